// How a thread reads and writes elements of the three types: the conversions are the CPU's own (spillway/bf16.h,
// spillway/fp16.h), so they have its bits, those of NaN too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/check.h"
#include "spillway/bf16.h"
#include "spillway/dtype.h"
#include "spillway/fp16.h"

namespace spillway::cuda {

struct Float32 {
  using Element = float;
  static __device__ float widen(float x) { return x; }
  static __device__ float narrow(float x) { return x; }
};
struct BFloat16 {
  using Element = std::uint16_t;
  static __device__ float widen(std::uint16_t x) { return bf16_to_float(x); }
  static __device__ std::uint16_t narrow(float x) { return float_to_bf16(x); }
};
struct Float16 {
  using Element = std::uint16_t;
  static __device__ float widen(std::uint16_t x) { return fp16_to_float(x); }
  static __device__ std::uint16_t narrow(float x) { return float_to_fp16(x); }
};

// Calls work(type) with the struct of `type`.
template <typename Work>
void for_type(DType type, Work work) {
  switch (type) {
    case DType::kFloat32: return work(Float32{});
    case DType::kBFloat16: return work(BFloat16{});
    case DType::kFloat16: return work(Float16{});
  }
}

// Several consecutive elements that move as one access of up to 16 bytes.
template <typename T, unsigned N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};
template <unsigned N, typename T>
__device__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <unsigned N, typename T>
__device__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}
template <unsigned N, typename T>
bool packs_align(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(Pack<T, N>) == 0;
}

// Blocks for `count` threads' worth of work; 0 only for none.
inline unsigned blocks_for(std::size_t count, unsigned threads) {
  return static_cast<unsigned>((count + threads - 1) / threads);
}

}  // namespace spillway::cuda
