// Elements as they lie in a file, to the fp32 that everything here computes with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "spillway/bf16.h"
#include "spillway/dtype.h"
#include "spillway/fp16.h"

namespace spillway {

// Exact. `from` has out.size() elements of `type`, at any alignment.
inline void widen(std::span<const std::byte> from, DType type, std::span<float> to) {
  if (type == DType::kFloat32) {
    std::memcpy(to.data(), from.data(), to.size_bytes());
    return;
  }
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from.data() + 2 * i, 2);
    to[i] = type == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
}

}  // namespace spillway
