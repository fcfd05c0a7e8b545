// Sums over rows in two stages: blocks of rows to partial sums, partial sums to the result.
#include <algorithm>

#include "tools/models/ops/cuda/layer_kernels.h"
#include "tools/models/ops/cuda/vectors.cuh"

namespace spillway::models {
namespace {

constexpr unsigned kLanes = 8;  // rows that a block of the first stage reads at one time
constexpr std::size_t kRowsOfBlock = 256;
constexpr unsigned kFinishLanes = 32;

std::size_t row_blocks(std::size_t rows) { return (rows + kRowsOfBlock - 1) / kRowsOfBlock; }

// Threads (32, kLanes): thread x has N neighbouring columns, thread y every kLanes-th row of the block's.
template <typename T, unsigned N>
__global__ void sum_block_of_rows(const T* x, std::size_t rows, std::size_t columns, std::size_t stride,
                                  float* partial) {
  __shared__ float sums[kLanes][32 * N + 1];
  const std::size_t c = (std::size_t{blockIdx.x} * 32 + threadIdx.x) * N;
  const std::size_t first = blockIdx.y * kRowsOfBlock, end = min(first + kRowsOfBlock, rows);
  float sum[N] = {};
  if (c < columns) {
#pragma unroll 4
    for (std::size_t r = first + threadIdx.y; r < end; r += kLanes) {
      float row[N];
      load(x + r * stride + c, row);
#pragma unroll
      for (unsigned i = 0; i < N; ++i) sum[i] += row[i];
    }
  }
#pragma unroll
  for (unsigned i = 0; i < N; ++i) sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
  __syncthreads();
  for (unsigned i = threadIdx.y * 32 + threadIdx.x; i < 32 * N; i += 32 * kLanes) {
    const std::size_t column = std::size_t{blockIdx.x} * 32 * N + i;
    if (column >= columns) continue;
    float total = sums[0][i];
    for (unsigned lane = 1; lane < kLanes; ++lane) total += sums[lane][i];
    partial[blockIdx.y * columns + column] = total;
  }
}

__device__ void put(const SumTarget& target, std::size_t column, float sum) {
  switch (target.type) {
    case DType::kFloat32: {
      float* to = static_cast<float*>(target.to) + column;
      *to = target.accumulate ? *to + sum : sum;
      return;
    }
    case DType::kBFloat16: narrow(sum, static_cast<__nv_bfloat16*>(target.to)[column]); return;
    case DType::kFloat16: narrow(sum, static_cast<__half*>(target.to)[column]); return;
  }
}

// Threads (32, kFinishLanes): thread x is a column, thread y has every kFinishLanes-th partial sum.
__global__ void sum_partials(const float* partial, std::size_t rows, std::size_t columns, SumTarget first,
                             SumTarget second) {
  __shared__ float sums[kFinishLanes][32];
  const std::size_t c = std::size_t{blockIdx.x} * 32 + threadIdx.x;
  const float* from = partial + blockIdx.y * rows * columns;
  float sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (std::size_t r = threadIdx.y; r < rows; r += kFinishLanes) sum += from[r * columns + c];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  for (unsigned lane = 1; lane < kFinishLanes; ++lane) sum += sums[lane][threadIdx.x];
  // Not one call with a choice of the two: that has an address, and so lies in local memory.
  if (blockIdx.y == 0) {
    put(first, c, sum);
  } else {
    put(second, c, sum);
  }
}

template <typename T, unsigned N>
cudaError_t launch_blocks(const ColumnSums& op, float* partial, cudaStream_t stream) {
  const std::size_t of_block = 32 * N;
  const dim3 grid(static_cast<unsigned>((op.columns + of_block - 1) / of_block),
                  static_cast<unsigned>(row_blocks(op.rows)));
  sum_block_of_rows<T, N>
      <<<grid, dim3(32, kLanes), 0, stream>>>(static_cast<const T*>(op.x), op.rows, op.columns, op.stride, partial);
  return cudaGetLastError();
}

}  // namespace

std::size_t column_sums_scratch_bytes(std::size_t rows, std::size_t columns) {
  return row_blocks(rows) * columns * sizeof(float);
}

cudaError_t column_sums(const ColumnSums& op, void* scratch, cudaStream_t stream) {
  auto* partial = static_cast<float*>(scratch);
  const cudaError_t result = for_type(op.type, [&]<typename T>(T) {
    return all_vectors<T>({op.columns, op.stride}, {op.x}) ? launch_blocks<T, kVector<T>>(op, partial, stream)
                                                           : launch_blocks<T, 1>(op, partial, stream);
  });
  if (result != cudaSuccess) return result;
  return finish_sums(partial, row_blocks(op.rows), op.columns, {op.target, {}}, 1, stream);
}

cudaError_t finish_sums(const float* partial, std::size_t rows, std::size_t columns, const SumTarget (&targets)[2],
                        unsigned count, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((columns + 31) / 32), count);
  sum_partials<<<grid, dim3(32, kFinishLanes), 0, stream>>>(partial, rows, columns, targets[0], targets[1]);
  return cudaGetLastError();
}

}  // namespace spillway::models
