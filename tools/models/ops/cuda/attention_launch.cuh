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

// Backward has a pass for each.
enum class Side { kQueries, kKeys };

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
  int queries, keys, first;  // of a row; the position of its first query, where its first key has 0
  int heads, group;          // as many heads share keys and values
  int head_width;
  std::int64_t qkv_stride, out_stride;  // of rows of qkv and dqkv; of out and dout
  std::int64_t tokens;                  // queries of all rows together
  Order order;
};

// A block has a tile of `rows` rows of a pair, queries or keys, and all tiles of a pair read two tensors of the other
// side: keys and values, or what its group of heads has of queries and their gradients.
inline Problem problem_of(const AttentionShape& shape, const Inputs& in, Side side, std::uint32_t rows) {
  constexpr std::uint64_t kCacheBytes = 16 << 20;
  const bool of_queries = side == Side::kQueries;
  const std::uint32_t group = shape.heads / shape.key_heads,
                      keys = static_cast<std::uint32_t>(in.first) + shape.sequence;
  const std::uint32_t pairs = shape.batch * (of_queries ? shape.heads : shape.key_heads);
  const std::uint64_t others = of_queries ? keys : std::uint64_t{shape.sequence} * group;
  const std::uint64_t bytes = 2 * others * shape.head_width * size_of(shape.type);
  // All sections alike: the blocks of a small last one would run alone.
  const std::uint64_t sections = std::min<std::uint64_t>((pairs * bytes + kCacheBytes - 1) / kCacheBytes, pairs);
  const auto section = static_cast<std::uint32_t>((pairs + sections - 1) / sections);
  return {.queries = static_cast<int>(shape.sequence),
          .keys = static_cast<int>(keys),
          .first = in.first,
          .heads = static_cast<int>(shape.heads),
          .group = static_cast<int>(group),
          .head_width = static_cast<int>(shape.head_width),
          .qkv_stride = shape.qkv_width(),
          .out_stride = shape.query_width(),
          .tokens = shape.tokens(),
          .order = {pairs, ((of_queries ? shape.sequence : keys) + rows - 1) / rows, section}};
}

// The first key that each query of a row sees. Its last one is the query itself.
class FirstKeys {
 public:
  __device__ __forceinline__ FirstKeys(const Inputs& in, const Problem& problem, int batch)
      : starts_(in.starts == nullptr ? nullptr : in.starts + std::int64_t{batch} * problem.queries),
        first_(problem.first),
        window_(in.window),
        queries_(problem.queries) {}

  // Past the row's last query: as that one's.
  __device__ __forceinline__ int of(int query) const {
    const int own = min(query, queries_ - 1), position = first_ + own, behind = max(position - window_ + 1, 0);
    if (starts_ == nullptr) return behind;
    return max(behind, static_cast<int>(min(starts_[own], static_cast<std::uint32_t>(position))));
  }
  // The lowest and the highest of `count` queries, in every lane of a whole warp.
  struct Range {
    int lowest, highest;
  };
  __device__ __forceinline__ Range range(int query, int count) const {
    Range range{0x7fffffff, 0};
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
      const int low = of(query + i);
      range = {min(range.lowest, low), max(range.highest, low)};
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      range.lowest = min(range.lowest, __shfl_xor_sync(0xffffffffu, range.lowest, distance));
      range.highest = max(range.highest, __shfl_xor_sync(0xffffffffu, range.highest, distance));
    }
    return range;
  }
  // One past the last query from `begin` on that sees a key up to `last_key`; at most `begin`: there is none. All
  // threads of the block call it, and all get it.
  __device__ __forceinline__ int end_of_queries(int begin, int last_key) const {
    // Past it, windows begin after that key.
    const int end = min(queries_, last_key - first_ + min(window_, first_ + queries_));
    if (starts_ == nullptr) return end;
    __shared__ int ends[32];
    int own = begin;
    for (int query = begin + static_cast<int>(threadIdx.x); query < end; query += static_cast<int>(blockDim.x)) {
      if (of(query) <= last_key) own = query + 1;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) own = max(own, __shfl_xor_sync(0xffffffffu, own, distance));
    if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = own;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) own = max(own, ends[warp]);
    return own;
  }

 private:
  const std::uint32_t* starts_;
  int first_, window_, queries_;
};

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
