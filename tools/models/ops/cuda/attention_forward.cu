// Forward on tensor cores, after FlashAttention-2 (arXiv:2307.08691): a block has 128 queries of one head, 32 to a
// warp, and goes through the keys it sees 64 (wide heads: 32) at a time, last ones first. Scores and sums stay in
// registers; while one block of keys and values is worked on, the next is copied into shared memory.
#include "tools/models/ops/cuda/attention_tile.cuh"

namespace spillway::models::attention {
namespace {

constexpr int kRowTiles = 2, kWarpRows = 16 * kRowTiles, kQueries = kWarps * kWarpRows;

// As many as registers allow.
template <int kWidth>
constexpr int kKeys = kWidth == 64 ? 64 : 32;

template <int kWidth>
struct Shared {
  static constexpr int kQueryBytes = kQueries * kRowBytes<kWidth>, kKeyBytes = kKeys<kWidth> * kRowBytes<kWidth>;
  // queries | keys 0, values 0 | keys 1, values 1
  static constexpr int kBytes = kQueryBytes + 4 * kKeyBytes;
  static_assert(kBytes <= 99 * 1024);
};

// Below every score. Not -infinity, whose differences are not numbers: a row may see no key of the steps that a warp
// begins with.
constexpr float kNoScore = -1e30f;

// Of each of a lane's rows, [i][half] for row 16 i + 8 half + lane / 4 of the warp's: an upper bound of its scores,
// nearly (unscaled), and this lane's part of its sum of exponentials.
struct Softmax {
  float top[kRowTiles][2], sum[kRowTiles][2];
};

// Sums are kept relative to `top`. It follows the highest score only when that is more than 2^8 ahead: then all are
// rescaled. So exponentials stay below 2^8, which costs no precision, and most blocks of keys need no exchange between
// lanes. `unit` is scale * log2(e).
template <int kWidth, int kScoreTiles>
__device__ __forceinline__ void raise_tops(const Accumulators<kRowTiles, kScoreTiles>& scores,
                                           Accumulators<kRowTiles, kWidth / 8>& out, Softmax& softmax, float unit,
                                           float slack) {
  float highest[kRowTiles][2];
  bool higher = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float h = fmaxf(scores[i][0][2 * half], scores[i][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kScoreTiles; ++n) h = fmaxf(h, fmaxf(scores[i][n][2 * half], scores[i][n][2 * half + 1]));
      highest[i][half] = h;
      higher |= h > softmax.top[i][half] + slack;
    }
  }
  if (!__any_sync(kAllLanes, higher)) return;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float h = highest[i][half];
      h = fmaxf(h, __shfl_xor_sync(kAllLanes, h, 1));
      h = fmaxf(h, __shfl_xor_sync(kAllLanes, h, 2));
      h = fmaxf(h, softmax.top[i][half]);
      const float factor = exp2_approximately((softmax.top[i][half] - h) * unit);
      softmax.top[i][half] = h;
      softmax.sum[i][half] *= factor;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        out[i][n][2 * half] *= factor;
        out[i][n][2 * half + 1] *= factor;
      }
    }
  }
}

// scores become soft_cap * tanh(scale * score / soft_cap).
template <int kScoreTiles>
__device__ __forceinline__ void cap(Accumulators<kRowTiles, kScoreTiles>& scores, const Inputs& in) {
  const float factor = in.scale / in.soft_cap;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i][n][e] = in.soft_cap * tanhf(scores[i][n][e] * factor);
    }
  }
}

// scores become exponentials relative to their row's top.
template <int kScoreTiles>
__device__ __forceinline__ void exponentiate(Accumulators<kRowTiles, kScoreTiles>& scores, Softmax& softmax,
                                             float unit) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = -softmax.top[i][half] * unit;
      float sum = softmax.sum[i][half];
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[i][n][e] = exp2_approximately(__fmaf_rn(scores[i][n][e], unit, base));
          sum += scores[i][n][e];
        }
      }
      softmax.sum[i][half] = sum;
    }
  }
}

// Of a lane's rows, laid out as in Softmax: the first keys that they see.
using RowKeys = int[kRowTiles][2];

// Scores of keys after the query, which includes all keys past the end of the sequence, and before its first one.
template <bool kRules, int kScoreTiles>
__device__ __forceinline__ void mask(Accumulators<kRowTiles, kScoreTiles>& scores, int first_position, int first_key,
                                     const RowKeys& row_keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int position = first_position + 16 * i + e / 2 * 8 + lane / 4;
        const int key = first_key + 8 * n + lane % 4 * 2 + e % 2;
        if (key > position || (kRules && key < row_keys[i][e / 2])) scores[i][n][e] = -INFINITY;
      }
    }
  }
}

// Completes a warp's sums over all lanes; writes log_sums; gives the factors that the rows of `out` still need.
__device__ __forceinline__ void finish_softmax(const Softmax& softmax, float (&factors)[kRowTiles][2], float* log_sums,
                                               int first_query, float scale, const Problem& problem) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[i][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      factors[i][half] = 1.0f / sum;
      const int query = first_query + 16 * i + 8 * half + lane / 4;
      if (lane % 4 == 0 && query < problem.queries) {
        log_sums[query] = softmax.top[i][half] * scale + logf(sum);
      }
    }
  }
}

template <typename Element, int kWidth, bool kRules>
__global__ void __launch_bounds__(kThreads) forward_kernel(Problem problem, Forward op) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Layout = Shared<kWidth>;
  constexpr int kStep = kKeys<kWidth>;
  const Work work = work_of(problem.order, blockIdx.x, problem.heads);
  const int first_query = static_cast<int>(problem.order.tiles - 1 - work.rank) * kQueries;
  const std::int64_t stride = problem.qkv_stride, key_stride = op.in.key_stride;
  const std::int64_t first_token = std::int64_t{work.batch} * problem.queries;
  const std::int64_t column = std::int64_t{work.head} * problem.head_width;
  const std::int64_t key_at = work.batch * problem.keys * key_stride + work.head / problem.group * problem.head_width;
  const Element* query = static_cast<const Element*>(op.in.qkv) + first_token * stride + column;
  const Element* key = static_cast<const Element*>(op.in.keys) + key_at;
  const Element* value = static_cast<const Element*>(op.in.values) + key_at;

  const std::uint32_t query_tile = shared_address(shared), key_tile = query_tile + Layout::kQueryBytes;
  const int warp = threadIdx.x / 32, warp_query = first_query + warp * kWarpRows;
  const int warp_position = problem.first + warp_query;
  const auto begin_keys = [&](int first, int stage) {
    const std::uint32_t tile = key_tile + stage * 2 * Layout::kKeyBytes;
    begin_load<kWidth, kStep>(tile, key, key_stride, first, problem.keys, problem);
    begin_load<kWidth, kStep>(tile + Layout::kKeyBytes, value, key_stride, first, problem.keys, problem);
    commit_copies();
  };
  begin_load<kWidth, kQueries>(query_tile, query, stride, first_query, problem.queries, problem);
  int first_key = min(problem.first + first_query + kQueries - 1, problem.keys - 1) / kStep * kStep;
  begin_keys(first_key, 0);

  // The block's last step; what the warp's rows see.
  int last_step = 0;
  FirstKeys::Range seen{0, 0};
  RowKeys row_keys{};
  if constexpr (kRules) {
    const FirstKeys first_keys(op.in, problem, work.batch);
    last_step = first_keys.range(first_query, kQueries).lowest / kStep * kStep;
    seen = first_keys.range(warp_query, kWarpRows);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      row_keys[i / 2][i % 2] = first_keys.of(warp_query + 8 * i + static_cast<int>(threadIdx.x) % 32 / 4);
    }
  }

  Rows<kWidth, kRowTiles, kWidth == 64> queries(Pieces<kWidth>::by_columns(query_tile, warp * kWarpRows));
  wait_for_copies();
  __syncthreads();
  queries.begin();

  const bool capped = kRules && op.in.soft_cap != 0;
  const float scale = capped ? 1.0f : op.in.scale;
  const float unit = scale * kLog2E, slack = 8 / unit;
  Accumulators<kRowTiles, kWidth / 8> out;
  clear<kRowTiles, kWidth / 8>(out);
  Softmax softmax;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    softmax.top[i][0] = softmax.top[i][1] = kNoScore;
    softmax.sum[i][0] = softmax.sum[i][1] = 0;
  }
  for (int stage = 0; first_key >= last_step; first_key -= kStep, stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // this stage is there, and nobody reads the other one any more
    if (first_key > last_step) begin_keys(first_key - kStep, stage ^ 1);
    if (first_key >= warp_position + kWarpRows) continue;
    if (kRules && first_key + kStep <= seen.lowest) continue;
    const std::uint32_t tile = key_tile + stage * 2 * Layout::kKeyBytes;
    float scores[kRowTiles][kStep / 8][4];
    dot_rows<Element>(scores, queries, Pieces<kWidth>::by_rows(tile, 0), 0);
    if (capped) cap(scores, op.in);
    if (first_key + kStep > warp_position + 1 || (kRules && first_key < seen.highest)) {
      mask<kRules>(scores, warp_position, first_key, row_keys);
    }
    raise_tops<kWidth>(scores, out, softmax, unit, slack);
    exponentiate(scores, softmax, unit);
    add_weighted<Element>(out, scores, Pieces<kWidth>::by_columns(tile + Layout::kKeyBytes, 0), 0);
  }

  float factors[kRowTiles][2];
  finish_softmax(softmax, factors, op.log_sums + work.head * problem.tokens + first_token, warp_query, scale, problem);
  // Into this warp's own queries, which nobody reads any more.
  unsigned char* rows = shared + warp * kWarpRows * kRowBytes<kWidth>;
  __syncwarp();
  write_rows<Element, kWidth, kRowTiles>(rows, out, factors);
  __syncwarp();
  store_rows<kWidth, kWarpRows>(rows, static_cast<Element*>(op.out) + first_token * problem.out_stride + column,
                                problem.out_stride, warp_query, 0, problem.queries, problem);
}

template <typename Element, int kWidth>
cudaError_t forward_of_width(const AttentionShape& shape, const Forward& op, cudaStream_t stream) {
  const auto kernel =
      op.in.has_rules() ? forward_kernel<Element, kWidth, true> : forward_kernel<Element, kWidth, false>;
  return launch(kernel, problem_of(shape, op.in, Side::kQueries, kQueries), op, kThreads, Shared<kWidth>::kBytes,
                stream);
}

template <typename Element>
cudaError_t forward_of(const AttentionShape& shape, const Forward& op, cudaStream_t stream) {
  if (shape.head_width <= 64) return forward_of_width<Element, 64>(shape, op, stream);
  if (shape.head_width <= 96) return forward_of_width<Element, 96>(shape, op, stream);
  return forward_of_width<Element, 128>(shape, op, stream);
}

}  // namespace

cudaError_t forward_on_tensor_cores(const AttentionShape& shape, const Forward& op, cudaStream_t stream) {
  return shape.type == DType::kBFloat16 ? forward_of<__nv_bfloat16>(shape, op, stream)
                                        : forward_of<__half>(shape, op, stream);
}

}  // namespace spillway::models::attention
