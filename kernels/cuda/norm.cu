// The squared norm in the order of kernels/norm.h. Half a warp takes a leaf, lane l its accumulator l: 16 consecutive
// elements are one access. A product of two elements is exact in double, so the fused multiply-add rounds as the CPU's
// two instructions do.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/kernels.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kAccumulators = 16;
constexpr unsigned kThreads = 256;
constexpr unsigned kLeavesPerBlock = kThreads / kAccumulators;
constexpr unsigned kAhead = 16;  // loads in flight of a thread

template <typename Type>
__global__ void leaf_sums(const typename Type::Element* data, std::size_t count, double* leaves,
                          unsigned long long* first_nonfinite) {
  const unsigned lane = threadIdx.x % kAccumulators;
  const std::size_t leaf = std::size_t{blockIdx.x} * kLeavesPerBlock + threadIdx.x / kAccumulators;
  const std::size_t begin = leaf * kNormLeaf;
  double sum = 0;
  std::uint64_t bad = kAllFinite;
  for (unsigned row = 0; row < kNormLeaf / kAccumulators; row += kAhead) {
    float x[kAhead];
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const std::size_t i = begin + (row + k) * kAccumulators + lane;
      x[k] = i < count ? Type::widen(data[i]) : 0.0f;
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const auto wide = static_cast<double>(x[k]);
      sum = __fma_rn(wide, wide, sum);
      const std::uint64_t i = begin + (row + k) * kAccumulators + lane;
      if (!isfinite(x[k]) && i < bad) bad = i;
    }
  }
#pragma unroll
  for (unsigned half = kAccumulators / 2; half > 0; half /= 2) {
    sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, half, kAccumulators));
  }
  if (bad != kAllFinite) atomicMin(first_nonfinite, static_cast<unsigned long long>(bad));
  if (lane == 0 && begin < count) leaves[leaf] = sum;
}

// In order: one addition waits for the one before. The other threads fetch what comes next.
__global__ void add_leaves(const double* leaves, std::size_t count, NormResult* result) {
  __shared__ double next[2][kThreads];
  double sum = 0;
  if (threadIdx.x < count) next[0][threadIdx.x] = leaves[threadIdx.x];
  for (std::size_t begin = 0, turn = 0; begin < count; begin += kThreads, turn ^= 1) {
    __syncthreads();
    const std::size_t ahead = begin + kThreads + threadIdx.x;
    if (ahead < count) next[turn ^ 1][threadIdx.x] = leaves[ahead];
    if (threadIdx.x != 0) continue;
    const unsigned here = static_cast<unsigned>(count - begin < kThreads ? count - begin : kThreads);
#pragma unroll 8
    for (unsigned k = 0; k < here; ++k) sum = __dadd_rn(sum, next[turn][k]);
  }
  if (threadIdx.x == 0) result->sum_of_squares = sum;
}

}  // namespace

void squared_norm(const void* data, DType type, std::size_t count, double* leaves, NormResult* result,
                  cudaStream_t stream) {
  const std::size_t leaf_count = (count + kNormLeaf - 1) / kNormLeaf;
  static_assert(kAllFinite == UINT64_MAX, "all its bytes are 0xff");
  check(cudaMemsetAsync(&result->first_nonfinite, 0xff, sizeof result->first_nonfinite, stream), "a fill");
  if (count > 0) {
    for_type(type, [&]<typename Type>(Type) {
      leaf_sums<Type><<<blocks_for(leaf_count, kLeavesPerBlock), kThreads, 0, stream>>>(
          static_cast<const typename Type::Element*>(data), count, leaves,
          reinterpret_cast<unsigned long long*>(&result->first_nonfinite));
    });
    check(cudaGetLastError(), "the norm of a gradient");
  }
  add_leaves<<<1, kThreads, 0, stream>>>(leaves, leaf_count, result);
  check(cudaGetLastError(), "the norm of a gradient");
}

}  // namespace spillway::cuda
