// In place of the project's file of this name: the same functions without the instructions of sm_80.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/device_code.h"

namespace spillway::models::attention {

// Shared memory's addresses count from its beginning.
inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(shared) - emulated::dynamic_shared());
}

// Copies are under way until the thread waits for them: what is read before is a NaN.
struct PendingCopies {
  struct Copy {
    std::uint32_t to;
    const void* from;  // null: zeros
    std::uint32_t bytes;
  };
  std::vector<Copy> of[1024];
};
inline std::vector<PendingCopies::Copy>& pending_copies() {
  static PendingCopies all;
  return all.of[threadIdx.x];
}
inline void copy(std::uint32_t to, const void* from, bool valid, std::uint32_t bytes) {
  if (to % bytes != 0 || (valid && reinterpret_cast<std::uintptr_t>(from) % bytes != 0)) {
    emulated::stop("an asynchronous copy that is not aligned");
  }
  std::memset(emulated::dynamic_shared() + to, 0xff, bytes);
  pending_copies().push_back({to, valid ? from : nullptr, bytes});
}
inline void copy_16_bytes(std::uint32_t to, const void* from, bool valid) { copy(to, from, valid, 16); }
inline void copy_4_bytes(std::uint32_t to, const void* from, bool valid) { copy(to, from, valid, 4); }
inline void commit_copies() {}
inline void wait_for_copies() {
  for (const auto& copy : pending_copies()) {
    unsigned char* to = emulated::dynamic_shared() + copy.to;
    copy.from != nullptr ? std::memcpy(to, copy.from, copy.bytes) : std::memset(to, 0, copy.bytes);
  }
  pending_copies().clear();
}

inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t row, bool transposed) {
  if (row % 16 != 0) emulated::stop("a matrix's row that is not aligned");
  const unsigned lane = emulated::lane();
  emulated::exchange(row, [&](auto row_of) {
    for (unsigned m = 0; m < 4; ++m) {
      std::uint16_t elements[2];
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned r = transposed ? lane % 4 * 2 + e : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + e;
        std::memcpy(&elements[e], emulated::dynamic_shared() + row_of(8 * m + r) + 2 * c, 2);
      }
      std::memcpy(&to[m], elements, sizeof elements);
    }
    return 0;
  });
}
inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) { load_matrices(to, row, false); }
inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t row) { load_matrices(to, row, true); }

// Element `e` of the two in a register.
template <typename Element>
float element(std::uint32_t pair, unsigned e) {
  const auto bits = static_cast<std::uint16_t>(pair >> (16 * e));
  return static_cast<float>(std::bit_cast<Element>(bits));
}

// The layout of fragments is that of the project's file.
template <typename Element>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  struct Fragments {
    std::uint32_t a[4], b[2];
  };
  const unsigned g = emulated::lane() / 4, t = emulated::lane() % 4;
  float left[2][16], right[2][16];  // rows g and g + 8; columns 2 t and 2 t + 1
  emulated::exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of) {
    for (unsigned k = 0; k < 16; k += 2) {
      const unsigned half = k / 8, pair = k % 8 / 2;
      const Fragments row = of(4 * g + pair), columns[2] = {of(4 * (2 * t) + pair), of(4 * (2 * t + 1) + pair)};
      for (unsigned e = 0; e < 2; ++e) {
        for (unsigned i = 0; i < 2; ++i) left[i][k + e] = element<Element>(row.a[2 * half + i], e);
        for (unsigned i = 0; i < 2; ++i) right[i][k + e] = element<Element>(columns[i].b[half], e);
      }
    }
    return 0;
  });
  for (unsigned i = 0; i < 4; ++i) {
    float sum = 0;
    for (unsigned k = 0; k < 16; ++k) sum += left[i / 2][k] * right[i % 2][k];
    c[i] += sum;
  }
}

inline float exp2_approximately(float x) { return std::exp2(x); }

}  // namespace spillway::models::attention
