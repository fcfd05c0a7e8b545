// The softmax over the vocabulary, the loss of each token and the gradient of its logits, a block for each token: once
// over the logits for their maximum and the sum of exponentials, once more for the gradients, which are written over
// them (layer_kernels.h says where).
//
// In 16 bits the second time goes chunk by chunk. A chunk is read whole before any of its gradients is written, and
// gradients lie at half the distance from the row's start: over the chunk itself (the first one) or what lies before
// it.
//
//   logits     | chunk 0       | chunk 1       | chunk 2       | …
//   gradients  | 0     | 1     | 2     | …
#include <cmath>

#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

constexpr unsigned kThreads = 1024;
constexpr unsigned kN = 4;  // logits of a thread in a chunk

// Of some logits: their maximum, and the sum of exp(logit - maximum).
struct Exponentials {
  float maximum, sum;
};

__device__ Exponentials combine(Exponentials a, Exponentials b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  // Of no logits at all: nothing, rather than exp(-inf - -inf).
  if (maximum == -INFINITY) return {maximum, a.sum + b.sum};
  return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

// soft_cap * tanh(x / soft_cap), and the derivative of that.
struct Capped {
  float value, slope;
};
__device__ Capped capped(float x, float soft_cap) {
  if (soft_cap == 0) return {x, 1};
  const float t = tanhf(x / soft_cap);
  return {soft_cap * t, 1 - t * t};
}

__device__ Exponentials own_exponentials(const float* logits, std::size_t vocabulary, float soft_cap) {
  Exponentials own{-INFINITY, 0};
  for (std::size_t c = threadIdx.x * kN; c < vocabulary; c += kThreads * kN) {
    float x[kN];
    load(logits + c, x);
    float maximum = own.maximum;
#pragma unroll
    for (unsigned i = 0; i < kN; ++i) {
      x[i] = c + i >= vocabulary ? -INFINITY : capped(x[i], soft_cap).value;
      maximum = fmaxf(maximum, x[i]);
    }
    float sum = own.sum * expf(own.maximum - maximum);
#pragma unroll
    for (unsigned i = 0; i < kN; ++i) sum += expf(x[i] - maximum);
    own = {maximum, sum};
  }
  return own;
}

// In every thread; both sides of an exchange compute the same bits, for additions commute.
__device__ Exponentials block_exponentials(Exponentials own) {
  __shared__ float maxima[32], sums[32];
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    own = combine(own, {__shfl_xor_sync(0xffffffffu, own.maximum, mask), __shfl_xor_sync(0xffffffffu, own.sum, mask)});
  }
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = own.maximum;
    sums[threadIdx.x / 32] = own.sum;
  }
  __syncthreads();
  own = {maxima[threadIdx.x % 32], sums[threadIdx.x % 32]};
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    own = combine(own, {__shfl_xor_sync(0xffffffffu, own.maximum, mask), __shfl_xor_sync(0xffffffffu, own.sum, mask)});
  }
  return own;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) row_gradients(HeadRows op) {
  float* logits = op.logits + std::size_t{blockIdx.x} * op.stride;
  T* gradients = reinterpret_cast<T*>(logits);
  const std::size_t target = op.targets[blockIdx.x];
  const bool learns = target != kNoTarget;
  const float target_logit = learns ? capped(logits[target], op.soft_cap).value : 0.0f,
              scale = learns ? op.scale : 0.0f;
  const Exponentials all = block_exponentials(own_exponentials(logits, op.vocabulary, op.soft_cap));
  const float log_sum = all.maximum + logf(all.sum);
  if (threadIdx.x == 0) op.losses[blockIdx.x] = learns ? log_sum - target_logit : 0.0f;

  for (std::size_t chunk = 0; chunk < op.vocabulary; chunk += kThreads * kN) {
    const std::size_t c = chunk + threadIdx.x * kN;
    float x[kN];
    if (c < op.vocabulary) {
      load(logits + c, x);
#pragma unroll
      for (unsigned i = 0; i < kN; ++i) {
        const Capped logit = capped(x[i], op.soft_cap);
        x[i] = expf(logit.value - log_sum) * scale;
        if (c + i == target) x[i] -= scale;
        x[i] *= logit.slope;
      }
    }
    __syncthreads();
    if (c < op.vocabulary) store(x, gradients + c);
  }
}

__global__ void cap(float* logits, std::size_t count, float soft_cap) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < count) logits[index] = capped(logits[index], soft_cap).value;
}

}  // namespace

cudaError_t cap_logits(float* logits, std::size_t count, float soft_cap, cudaStream_t stream) {
  cap<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(logits, count, soft_cap);
  return cudaGetLastError();
}

cudaError_t head_gradients(const HeadRows& op, cudaStream_t stream) {
  return for_type(op.type, [&]<typename T>(T) {
    row_gradients<T><<<static_cast<unsigned>(op.rows), kThreads, 0, stream>>>(op);
    return cudaGetLastError();
  });
}

}  // namespace spillway::models
