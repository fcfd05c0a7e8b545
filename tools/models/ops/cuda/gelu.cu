// gelu and its derivative, element by element, where cuBLASLt does not do them after a product.
#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

constexpr unsigned kThreads = 256;
constexpr float kSlope = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

__device__ float gelu_of(float x) {
  const float u = kSlope * (x + kCubic * x * x * x);
  return 0.5f * x * (1.0f + tanhf(u));
}

__device__ float derivative_of(float x) {
  const float t = tanhf(kSlope * (x + kCubic * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kSlope * (1.0f + 3.0f * kCubic * x * x);
}

// Vectors first, one a thread; the elements after the last whole one go to the first threads, one each.
template <typename T, bool kBackward>
__global__ void elements(const T* before, T* to, std::size_t count) {
  constexpr unsigned kN = kVector<T>;
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x, vectors = count / kN;
  if (index < vectors) {
    float x[kN], d[kN];
    load(before + index * kN, x);
    if constexpr (kBackward) load(to + index * kN, d);
#pragma unroll
    for (unsigned i = 0; i < kN; ++i) x[i] = kBackward ? d[i] * derivative_of(x[i]) : gelu_of(x[i]);
    store(x, to + index * kN);
  }
  const std::size_t single = vectors * kN + index;
  if (single < count) {
    const float x = widen(before[single]);
    narrow(kBackward ? widen(to[single]) * derivative_of(x) : gelu_of(x), to[single]);
  }
}

template <bool kBackward>
cudaError_t launch(DType type, const void* before, void* to, std::size_t count, cudaStream_t stream) {
  return for_type(type, [&]<typename T>(T) {
    const std::size_t threads = count / kVector<T> + kVector<T>;  // enough for both
    elements<T, kBackward><<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(before), static_cast<T*>(to), count);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t gelu(DType type, const void* before, void* after, std::size_t count, cudaStream_t stream) {
  return launch<false>(type, before, after, count, stream);
}

cudaError_t gelu_backward(DType type, const void* before, void* dx, std::size_t count, cudaStream_t stream) {
  return launch<true>(type, before, dx, count, stream);
}

}  // namespace spillway::models
