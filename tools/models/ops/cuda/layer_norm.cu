// Layer norm: a block for each row, whose elements stay in registers between the sums and their use.
//
// Backward goes over rows once: a block has kRows or more rows one after the other, and its threads keep the sums of
// their columns for dweight and dbias. What the blocks found is added in a second kernel.
#include <algorithm>

#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

// A thread has one vector of a row (as many threads as that takes), two in wider rows, and in the widest kMany, some of
// which then leave the registers.
constexpr unsigned kThreadsForFew = 512, kThreadsForMany = 1024, kMany = 4;
constexpr std::size_t kRows = 8, kMostBlocks = 512;

unsigned threads_for(std::size_t vectors, unsigned each) {
  const std::size_t threads = (vectors + each - 1) / each;
  return static_cast<unsigned>((threads + 31) / 32 * 32);
}

struct Rows {
  std::size_t count;
  unsigned of_block, blocks;
};
Rows rows_of(std::size_t m) {
  const std::size_t of_block = std::max(kRows, (m + kMostBlocks - 1) / kMostBlocks);
  return {m, static_cast<unsigned>(of_block), static_cast<unsigned>((m + of_block - 1) / of_block)};
}

template <typename T, unsigned N, unsigned kEach, unsigned kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    normalize(const T* x, const T* weight, const T* bias, T* out, float2* statistics, unsigned width, float epsilon) {
  __shared__ float sums[2][32];
  const std::size_t row = std::size_t{blockIdx.x} * width;
  float v[kEach][N], sum = 0, square = 0;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const unsigned c = (k * blockDim.x + threadIdx.x) * N;
    if (c >= width) continue;
    load(x + row + c, v[k]);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) sum += v[k][i];
  }
  const float mean = block_sum(sum, sums[0]) / static_cast<float>(width);
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    if ((k * blockDim.x + threadIdx.x) * N >= width) continue;
#pragma unroll
    for (unsigned i = 0; i < N; ++i) square += (v[k][i] - mean) * (v[k][i] - mean);
  }
  const float rstd = 1.0f / sqrtf(block_sum(square, sums[1]) / static_cast<float>(width) + epsilon);
  if (threadIdx.x == 0) statistics[blockIdx.x] = {mean, rstd};
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const unsigned c = (k * blockDim.x + threadIdx.x) * N;
    if (c >= width) continue;
    float w[N], b[N];
    load(weight + c, w);
    load(bias + c, b);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) b[i] = (v[k][i] - mean) * rstd * w[i] + b[i];
    store(b, out + row + c);
  }
}

// What a thread sums of its columns over all rows of the block.
template <unsigned N, unsigned kEach>
struct OwnColumns {
  float dweight[kEach][N], dbias[kEach][N];
};

// One row; every thread reads what it writes, so dx may lie over any of the others. `sums` [2][32] is shared.
template <typename T, unsigned N, unsigned kEach>
__device__ void row_backward(const T* x, const T* weight, const T* dout, const T* residual, T* dx, float2 statistics,
                             unsigned width, float (*sums)[32], OwnColumns<N, kEach>& own) {
  float normalized[kEach][N], g[kEach][N], mean_g = 0, mean_gn = 0;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const unsigned c = (k * blockDim.x + threadIdx.x) * N;
    if (c >= width) continue;
    load(x + c, normalized[k]);
    load(dout + c, g[k]);
    float w[N];
    load(weight + c, w);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      normalized[k][i] = (normalized[k][i] - statistics.x) * statistics.y;
      own.dbias[k][i] += g[k][i];
      own.dweight[k][i] += g[k][i] * normalized[k][i];
      g[k][i] *= w[i];
      mean_g += g[k][i];
      mean_gn += g[k][i] * normalized[k][i];
    }
  }
  mean_g = warp_sum(mean_g);
  mean_gn = warp_sum(mean_gn);
  if (threadIdx.x % 32 == 0) {
    sums[0][threadIdx.x / 32] = mean_g;
    sums[1][threadIdx.x / 32] = mean_gn;
  }
  __syncthreads();
  mean_g = sums[0][0];
  mean_gn = sums[1][0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) {
    mean_g += sums[0][w];
    mean_gn += sums[1][w];
  }
  mean_g /= static_cast<float>(width);
  mean_gn /= static_cast<float>(width);
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const unsigned c = (k * blockDim.x + threadIdx.x) * N;
    if (c >= width) continue;
    float r[N] = {};
    if (residual != nullptr) load(residual + c, r);
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
      r[i] = statistics.y * (g[k][i] - mean_g - normalized[k][i] * mean_gn) + r[i];
    }
    store(r, dx + c);
  }
}

struct BackwardSizes {
  std::size_t rows;
  unsigned of_block, width;
};

// partial: [2][blocks][width], of dweight and of dbias; null: nobody asks for them.
template <typename T, unsigned N, unsigned kEach, unsigned kThreads>
__global__ void __launch_bounds__(kThreads, kEach == 1 ? 1024 / kThreads : 1)
    block_backward(const T* x, const T* weight, const T* dout, const float2* statistics, const T* residual, T* dx,
                   float* partial, BackwardSizes sizes) {
  // Rows take turns with the two halves: a warp that is at the next row does not overwrite sums that others still read,
  // and it cannot be two rows ahead of them.
  __shared__ float sums[2][2][32];
  const unsigned width = sizes.width;
  OwnColumns<N, kEach> own{};
  const std::size_t first = std::size_t{blockIdx.x} * sizes.of_block;
  const std::size_t end = min(first + sizes.of_block, sizes.rows);
  for (std::size_t r = first; r < end; ++r) {
    const std::size_t row = r * width;
    row_backward<T, N, kEach>(x + row, weight, dout + row, residual == nullptr ? nullptr : residual + row, dx + row,
                              statistics[r], width, sums[r % 2], own);
  }
  if (partial == nullptr) return;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const unsigned c = (k * blockDim.x + threadIdx.x) * N;
    if (c >= width) continue;
    store(own.dweight[k], partial + std::size_t{blockIdx.x} * width + c);
    store(own.dbias[k], partial + (std::size_t{gridDim.x} + blockIdx.x) * width + c);
  }
}

// Calls work.operator()<N, kEach, kThreads>() as it suits rows of `width` elements of T.
template <typename T, typename Work>
cudaError_t for_width(std::size_t width, Work work) {
  constexpr unsigned kN = kVector<T>;
  if (rows_are_vectors<T>(width)) {
    if (width / kN <= kThreadsForFew) return work.template operator()<kN, 1, kThreadsForFew>();
    if (width / kN <= 2 * kThreadsForFew) return work.template operator()<kN, 2, kThreadsForFew>();
    return work.template operator()<kN, kMany, kThreadsForMany>();
  }
  if (width <= kThreadsForFew) return work.template operator()<1, 1, kThreadsForFew>();
  return work.template operator()<1, kMany, kThreadsForMany>();
}

}  // namespace

bool layer_norm_fits(const Shape& shape) {
  const std::size_t vector = 16 / size_of(shape.type);
  const std::size_t vectors = shape.width % vector == 0 ? shape.width / vector : shape.width;
  return vectors <= std::size_t{kThreadsForMany} * kMany;
}

cudaError_t layer_norm(const Shape& shape, const LayerNorm& op, cudaStream_t stream) {
  return for_type(shape.type, [&]<typename T>(T) {
    return for_width<T>(shape.width, [&]<unsigned N, unsigned kEach, unsigned kThreads>() {
      normalize<T, N, kEach, kThreads>
          <<<static_cast<unsigned>(tokens_of(shape, op.count)), threads_for(shape.width / N, kEach), 0, stream>>>(
              static_cast<const T*>(op.x), static_cast<const T*>(op.weight), static_cast<const T*>(op.bias),
              static_cast<T*>(op.out), reinterpret_cast<float2*>(op.statistics), shape.width, shape.epsilon);
      return cudaGetLastError();
    });
  });
}

std::size_t layer_norm_backward_scratch_bytes(const Shape& shape) {
  const std::size_t blocks = std::min<std::size_t>((shape.slice_tokens() + kRows - 1) / kRows, kMostBlocks);
  return 2 * blocks * shape.width * sizeof(float);
}

cudaError_t layer_norm_backward(const Shape& shape, const LayerNormBackward& op, void* scratch, cudaStream_t stream) {
  const Rows rows = rows_of(tokens_of(shape, op.count));
  auto* partial = op.dweight != nullptr ? static_cast<float*>(scratch) : nullptr;
  const cudaError_t result = for_type(shape.type, [&]<typename T>(T) {
    return for_width<T>(shape.width, [&]<unsigned N, unsigned kEach, unsigned kThreads>() {
      block_backward<T, N, kEach, kThreads><<<rows.blocks, threads_for(shape.width / N, kEach), 0, stream>>>(
          static_cast<const T*>(op.x), static_cast<const T*>(op.weight), static_cast<const T*>(op.dout),
          reinterpret_cast<const float2*>(op.statistics), static_cast<const T*>(op.residual), static_cast<T*>(op.dx),
          partial, BackwardSizes{rows.count, rows.of_block, shape.width});
      return cudaGetLastError();
    });
  });
  if (result != cudaSuccess || partial == nullptr) return result;
  const SumTarget targets[2] = {{op.dweight, op.gradient, op.accumulate}, {op.dbias, op.gradient, op.accumulate}};
  return finish_sums(partial, rows.blocks, shape.width, targets, 2, stream);
}

}  // namespace spillway::models
