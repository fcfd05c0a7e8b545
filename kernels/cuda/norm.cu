// The squared norm in the order of kernels/norm.h. Half a warp takes a leaf, lane l its accumulator l. Sixteen rows of
// sixteen elements come at a time, a row to each lane, and change hands in shared memory. A product of two elements is
// exact in double, so the fused multiply-add rounds as the CPU's two instructions do.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/kernels.h"

namespace spillway::cuda {
namespace {

constexpr unsigned kAccumulators = 16;
constexpr unsigned kThreads = 256;
constexpr unsigned kLeavesPerBlock = kThreads / kAccumulators;
constexpr unsigned kRows = kAccumulators;  // of a leaf, at a time
constexpr unsigned kPasses = kNormLeaf / kAccumulators / kRows;

// Elements from `i` on; beyond `count` zeros.
template <typename Element>
__device__ Pack<Element, kAccumulators> load_row(const Element* data, std::size_t i, std::size_t count, bool aligned) {
  if (aligned && i + kAccumulators <= count) return load_pack<kAccumulators>(data + i);
  Pack<Element, kAccumulators> row{};
#pragma unroll
  for (unsigned k = 0; k < kAccumulators; ++k) {
    if (i + k < count) row.at[k] = data[i + k];
  }
  return row;
}

template <typename Type>
__global__ void sum_leaves(const typename Type::Element* data, std::size_t count, bool aligned, double* leaves) {
  using Element = typename Type::Element;
  // Rows that are stored at one time, and leaves that are read at one time, begin in different banks.
  struct Leaf {
    alignas(16) Element rows[kRows][kAccumulators + 16 / sizeof(Element)];
    Element apart[kAccumulators];
  };
  __shared__ Leaf shared[kLeavesPerBlock];
  const unsigned lane = threadIdx.x % kAccumulators;
  auto& own = shared[threadIdx.x / kAccumulators].rows;
  const std::size_t leaf = std::size_t{blockIdx.x} * kLeavesPerBlock + threadIdx.x / kAccumulators;
  const std::size_t begin = leaf * kNormLeaf;
  double sum = 0;
  auto next = load_row(data, begin + lane * kAccumulators, count, aligned);
  for (unsigned pass = 0; pass < kPasses; ++pass) {
    const std::size_t first = begin + pass * kRows * kAccumulators;
    __syncwarp();
    store_pack(own[lane], next);
    __syncwarp();
    if (pass + 1 < kPasses) {
      next = load_row(data, first + (kRows + lane) * kAccumulators, count, aligned);
    }
#pragma unroll
    for (unsigned k = 0; k < kRows; ++k) {
      const auto wide = static_cast<double>(Type::widen(own[k][lane]));
      sum = __fma_rn(wide, wide, sum);
    }
  }
#pragma unroll
  for (unsigned half = kAccumulators / 2; half > 0; half /= 2) {
    sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, half, kAccumulators));
  }
  if (lane == 0 && begin < count) leaves[leaf] = sum;
}

// In order: one addition waits for the one before, and for nothing else, where a whole round of leaves is there. The
// other threads fetch what comes next.
__global__ void fold(const double* leaves, std::size_t count, NormResult* result) {
  __shared__ double next[2][kThreads];
  double sum = 0;
  if (threadIdx.x < count) next[0][threadIdx.x] = leaves[threadIdx.x];
  for (std::size_t begin = 0, turn = 0; begin < count; begin += kThreads, turn ^= 1) {
    __syncthreads();
    const std::size_t ahead = begin + kThreads + threadIdx.x;
    if (ahead < count) next[turn ^ 1][threadIdx.x] = leaves[ahead];
    if (threadIdx.x != 0) continue;
    if (count - begin >= kThreads) {
#pragma unroll
      for (unsigned k = 0; k < kThreads; ++k) sum = __dadd_rn(sum, next[turn][k]);
    } else {
      for (unsigned k = 0; k < count - begin; ++k) sum = __dadd_rn(sum, next[turn][k]);
    }
  }
  if (threadIdx.x != 0) return;
  result->sum_of_squares = sum;
  result->first_nonfinite = kAllFinite;
  for (std::size_t leaf = 0; !isfinite(sum) && leaf < count; ++leaf) {  // seldom
    if (isfinite(leaves[leaf])) continue;
    result->first_nonfinite = leaf * kNormLeaf;
    return;
  }
}

}  // namespace

void leaf_sums(const void* data, DType type, std::size_t count, double* leaves, cudaStream_t stream) {
  const std::size_t leaf_count = (count + kNormLeaf - 1) / kNormLeaf;
  if (count == 0) return;
  for_type(type, [&]<typename Type>(Type) {
    sum_leaves<Type><<<blocks_for(leaf_count, kLeavesPerBlock), kThreads, 0, stream>>>(
        static_cast<const typename Type::Element*>(data), count,
        packs_align<kAccumulators>(static_cast<const typename Type::Element*>(data)), leaves);
  });
  check(cudaGetLastError(), "the norm of a gradient");
}

void add_leaves(const double* leaves, std::size_t count, NormResult* result, cudaStream_t stream) {
  fold<<<1, kThreads, 0, stream>>>(leaves, count, result);
  check(cudaGetLastError(), "the norm of a gradient");
}

}  // namespace spillway::cuda
