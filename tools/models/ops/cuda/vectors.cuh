// How a thread reads and writes neighbouring elements, and sums over a block in a fixed order; private to
// tools/models/ops/cuda.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "spillway/dtype.h"

namespace spillway::models {

// Calls work(T{}) with the element type.
template <typename Work>
cudaError_t for_type(DType type, Work work) {
  switch (type) {
    case DType::kFloat32: return work(float{});
    case DType::kBFloat16: return work(__nv_bfloat16{});
    case DType::kFloat16: return work(__half{});
  }
  return cudaErrorInvalidValue;
}

// Elements that a thread moves in one access of 16 bytes. Rows of a multiple of them start at multiples of 16 bytes,
// for tensors do; other rows go element by element (N = 1).
template <typename T>
inline constexpr unsigned kVector = 16 / sizeof(T);
template <typename T>
bool rows_are_vectors(std::size_t width) {
  return width % kVector<T> == 0;
}

// Whether rows, and the parts of them that are used, begin at multiples of 16 bytes.
template <typename T>
bool all_vectors(std::initializer_list<std::size_t> elements, std::initializer_list<const void*> addresses) {
  return std::all_of(elements.begin(), elements.end(), [](std::size_t count) { return rows_are_vectors<T>(count); }) &&
         std::all_of(addresses.begin(), addresses.end(),
                     [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; });
}

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }

// To the nearest, ties to even.
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half& to) { to = __float2half_rn(x); }

template <typename T, unsigned N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T at[N];
};

template <unsigned N, typename T>
__device__ void load(const T* from, float (&to)[N]) {
  const auto vector = *reinterpret_cast<const Vector<T, N>*>(from);
#pragma unroll
  for (unsigned i = 0; i < N; ++i) to[i] = widen(vector.at[i]);
}

template <unsigned N, typename T>
__device__ void store(const float (&from)[N], T* to) {
  Vector<T, N> vector;
#pragma unroll
  for (unsigned i = 0; i < N; ++i) narrow(from[i], vector.at[i]);
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// The sum over all threads, in every thread. `warps` [32] is shared memory that no other sum uses before the block's
// next barrier. Blocks are whole warps.
__device__ inline float block_sum(float x, float* warps) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = warps[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) sum += warps[w];
  return sum;
}

}  // namespace spillway::models
