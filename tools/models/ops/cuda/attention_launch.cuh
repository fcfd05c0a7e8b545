// What every attention kernel is told about its problem, the order in which blocks take their work, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tools/models/ops/cuda/attention_paths.h"

namespace spillway::models::attention {

// Work comes as (pair of a batch row and a head) x (tile of a pair's rows). Tiles of a pair differ in length, so blocks
// start with the longest tile of every pair; and since all tiles of a pair read its keys and values (or queries and
// their gradients), only as many pairs are begun together, a section, as have those in the second-level cache:
//
//   block  0 ... section-1 | section ... 2 section-1 | ...            | sections follow one another
//          longest tile    | second longest          | ... shortest   |
struct Order {
  std::uint32_t pairs, tiles, section;
};

struct Work {
  int batch, head;
  int rank;  // of the tile: 0 is the longest
};

__device__ __forceinline__ Work work_of(const Order& order, std::uint32_t block, int heads) {
  const std::uint32_t first = block / (order.section * order.tiles) * order.section;
  const std::uint32_t pairs = min(order.section, order.pairs - first), within = block - first * order.tiles;
  const std::uint32_t pair = first + within % pairs;
  return {static_cast<int>(pair) / heads, static_cast<int>(pair) % heads, static_cast<int>(within / pairs)};
}

struct Problem {
  int sequence, heads, head_width;
  std::int64_t width, tokens;  // of a row; of all batch rows together
  float scale;                 // 1 / sqrt(head width)
  Order order;
};

// Two tensors of a pair are read by all of its tiles, of `rows` rows each.
inline Problem problem_of(const AttentionShape& shape, std::uint32_t rows) {
  constexpr std::uint64_t kCacheBytes = 16 << 20;
  const std::uint32_t head_width = shape.width / shape.heads, pairs = shape.batch * shape.heads;
  const std::uint64_t bytes = std::uint64_t{2} * shape.sequence * head_width * size_of(shape.type);
  // All sections alike: the blocks of a small last one would run alone.
  const std::uint64_t sections = std::min<std::uint64_t>((pairs * bytes + kCacheBytes - 1) / kCacheBytes, pairs);
  const auto section = static_cast<std::uint32_t>((pairs + sections - 1) / sections);
  return {.sequence = static_cast<int>(shape.sequence),
          .heads = static_cast<int>(shape.heads),
          .head_width = static_cast<int>(head_width),
          .width = shape.width,
          .tokens = std::int64_t{shape.batch} * shape.sequence,
          .scale = 1.0f / std::sqrt(static_cast<float>(head_width)),
          .order = {pairs, (shape.sequence + rows - 1) / rows, section}};
}

// Enqueues kernel<<<blocks of the order, threads, shared_bytes, stream>>>(problem, op).
template <typename Op>
cudaError_t launch(void (*kernel)(Problem, Op), const Problem& problem, const Op& op, unsigned threads,
                   std::size_t shared_bytes, cudaStream_t stream) {
  const std::uint64_t blocks = std::uint64_t{problem.order.pairs} * problem.order.tiles;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, problem, op);
}

}  // namespace spillway::models::attention
