// Forward and backward in plain fp32, for what the tensor cores do not take: fp32 tensors (no TF32), and 16-bit ones
// with odd head widths.
//
// A block has a few rows of one head, four to a warp, and goes through tiles of 32 columns (rows of the other side) in
// ascending order. Scores lie with rows in registers and a column in each lane; the products after them with a row in
// registers and 32 columns of the head across the lanes:
//
//   dot_columns     score[row] of lane = row · column[lane]                   both read along the head, 16 bytes a lane
//   add_weighted    sum[row][c] of lane += weight[row][k] column[k][32 c + lane]     weights go through shared memory
//
// Backward is two passes of one program, as in attention_backward.cu.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "tools/models/ops/cuda/attention_launch.cuh"

namespace spillway::models::attention {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kColumns = 32, kWarpRows = 4;

// Columns of a head in a tile: kWidth, zeros past the head's end.
template <int kWidth>
struct Shared {
  static constexpr int kWarps = kWidth == 256 ? 4 : 8, kThreads = 32 * kWarps, kRows = kWarps * kWarpRows;
  // An odd number of 16-byte pieces, so that lanes that read one piece each of their own column use all banks.
  static constexpr int kColumnStride = kWidth + 4;
  // In floats: rows x, rows y | columns x, columns y | weights of each warp, [row][column]
  static constexpr int kRowsAt[2] = {0, kRows* kWidth};
  static constexpr int kColumnsAt[2] = {2 * kRows * kWidth, 2 * kRows* kWidth + kColumns* kColumnStride};
  static constexpr int kWeightsAt = kColumnsAt[1] + kColumns * kColumnStride;
  static constexpr int kBytes = 4 * (kWeightsAt + kRows * kColumns);
  static_assert(kBytes <= 99 * 1024);
  // As many blocks are on a multiprocessor as its shared memory holds. Left to itself, the compiler takes fewer
  // registers than those leave, and spills.
  static constexpr int kBlocks = 100 * 1024 / (kBytes + 1024);
};

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widened(__half x) { return __half2float(x); }

template <typename Element>
__device__ __forceinline__ Element rounded(float x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// Rows [first, first + count) of a tensor into shared memory; zeros from `end` on.
template <int kWidth, typename Element>
__device__ __forceinline__ void load(float* to, int to_stride, const Element* from, std::int64_t stride, int first,
                                     int count, int end, const Problem& problem) {
  for (int index = threadIdx.x; index < count * kWidth; index += Shared<kWidth>::kThreads) {
    const int row = index / kWidth, column = index % kWidth;
    const bool valid = first + row < end && column < problem.head_width;
    to[row * to_stride + column] = valid ? widened(from[(first + row) * stride + column]) : 0;
  }
}

// scores[r] = row r of the warp · column of this lane.
template <int kWidth>
__device__ __forceinline__ void dot_columns(float (&scores)[kWarpRows], const float* rows, const float* columns,
                                            const Problem& problem) {
  const float* column = columns + threadIdx.x % 32 * Shared<kWidth>::kColumnStride;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) scores[r] = 0;
  for (int d = 0; d < problem.head_width; d += 4) {
    const float4 b = *reinterpret_cast<const float4*>(column + d);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float4 a = *reinterpret_cast<const float4*>(rows + r * kWidth + d);
      scores[r] = __fmaf_rn(a.x, b.x, scores[r]);
      scores[r] = __fmaf_rn(a.y, b.y, scores[r]);
      scores[r] = __fmaf_rn(a.z, b.z, scores[r]);
      scores[r] = __fmaf_rn(a.w, b.w, scores[r]);
    }
  }
}

// sum[r][c] += sum over columns k of weights[r] of lane k * columns[k][32 c + lane]. `scratch` is the warp's own.
template <int kWidth>
__device__ __forceinline__ void add_weighted(float (&sum)[kWarpRows][kWidth / 32], const float (&weights)[kWarpRows],
                                             float* scratch, const float* columns) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // scratch is read no more
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) scratch[r * kColumns + lane] = weights[r];
  __syncwarp();
#pragma unroll 2
  for (int first = 0; first < kColumns; first += 4) {
    float w[kWarpRows][4];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float4 four = *reinterpret_cast<const float4*>(scratch + r * kColumns + first);
      w[r][0] = four.x, w[r][1] = four.y, w[r][2] = four.z, w[r][3] = four.w;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int c = 0; c < kWidth / 32; ++c) {
        const float value = columns[(first + k) * Shared<kWidth>::kColumnStride + 32 * c + lane];
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) sum[r][c] = __fmaf_rn(w[r][k], value, sum[r][c]);
      }
    }
  }
}

// Rows `first` and on of some, of which a tensor has those of [begin, end).
template <typename Element, int kWidth>
__device__ __forceinline__ void store(Element* to, std::int64_t stride, const float (&sum)[kWarpRows][kWidth / 32],
                                      const float (&factors)[kWarpRows], int first, int begin, int end,
                                      const Problem& problem) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    if (first + r < begin || first + r >= end) continue;
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) {
      const int column = 32 * c + lane;
      if (column < problem.head_width) {
        to[(first + r - begin) * stride + column] = rounded<Element>(sum[r][c] * factors[r]);
      }
    }
  }
}

// Adds sums, times `factor`, to rows `first` and on of fp32 [end][...], and takes what is there then.
template <int kWidth>
__device__ __forceinline__ void add_to_rows(float (&sum)[kWarpRows][kWidth / 32], float factor, float* rows,
                                            std::int64_t stride, int first, int end, int head_width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    if (first + r >= end) break;
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) {
      const int column = 32 * c + lane;
      if (column >= head_width) continue;
      float* const at = rows + (first + r) * stride + column;
      *at = sum[r][c] = __fmaf_rn(sum[r][c], factor, *at);
    }
  }
}

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}
__device__ __forceinline__ float highest_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// Below every score. Not -infinity, whose differences are not numbers: a row may see no key of the first steps.
constexpr float kNoScore = -1e30f;

// Of one row: the highest score so far, and the sum of exponentials relative to it.
struct Softmax {
  float top, sum;
};

// `scores` become exponentials of what they are times `scale`, or capped; of keys that are not seen: zeros.
template <int kWidth>
__device__ __forceinline__ void exponentiate(float (&scores)[kWarpRows], Softmax (&softmax)[kWarpRows],
                                             float (&out)[kWarpRows][kWidth / 32], const int (&first_key)[kWarpRows],
                                             int position, int key, const Inputs& in) {
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    float score = scores[r] * in.scale;
    if (in.soft_cap != 0) score = in.soft_cap * tanhf(score / in.soft_cap);
    // Keys past the end of the sequence lie after the query, too.
    if (key > position + r || key < first_key[r]) score = -INFINITY;
    const float top = fmaxf(softmax[r].top, highest_of_lanes(score)), factor = expf(softmax[r].top - top);
    scores[r] = expf(score - top);
    softmax[r] = {top, __fmaf_rn(softmax[r].sum, factor, sum_of_lanes(scores[r]))};
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) out[r][c] *= factor;
  }
}

template <typename Element, int kWidth>
__global__ void __launch_bounds__(Shared<kWidth>::kThreads) forward_kernel(Problem problem, Forward op) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Layout = Shared<kWidth>;
  const Work work = work_of(problem.order, blockIdx.x, problem.heads);
  const int first_query = (static_cast<int>(problem.order.tiles) - 1 - work.rank) * Layout::kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_query = first_query + warp * kWarpRows;
  const int position = problem.first + warp_query;
  const std::int64_t key_stride = op.in.key_stride, first_token = std::int64_t{work.batch} * problem.queries;
  const std::int64_t column = std::int64_t{work.head} * problem.head_width;
  const std::int64_t key_at = work.batch * problem.keys * key_stride + work.head / problem.group * problem.head_width;
  const Element* query = static_cast<const Element*>(op.in.qkv) + first_token * problem.qkv_stride + column;
  const Element* key = static_cast<const Element*>(op.in.keys) + key_at;
  const Element* value = static_cast<const Element*>(op.in.values) + key_at;

  float* tiles = reinterpret_cast<float*>(shared);
  float *rows = tiles + Layout::kRowsAt[0], *keys = tiles + Layout::kColumnsAt[0];
  float *values = tiles + Layout::kColumnsAt[1], *weights = tiles + Layout::kWeightsAt + warp * kWarpRows * kColumns;
  load<kWidth>(rows, kWidth, query, problem.qkv_stride, first_query, Layout::kRows, problem.queries, problem);

  const FirstKeys first_keys(op.in, problem, work.batch);
  int first_key[kWarpRows];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) first_key[r] = first_keys.of(warp_query + r);
  const int lowest = first_keys.range(warp_query, kWarpRows).lowest;

  float out[kWarpRows][kWidth / 32] = {}, factors[kWarpRows];
  Softmax softmax[kWarpRows];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) softmax[r] = {kNoScore, 0};
  const int end = min(problem.first + first_query + Layout::kRows, problem.keys);
  for (int first = first_keys.range(first_query, Layout::kRows).lowest / kColumns * kColumns; first < end;
       first += kColumns) {
    __syncthreads();
    load<kWidth>(keys, Layout::kColumnStride, key, key_stride, first, kColumns, problem.keys, problem);
    load<kWidth>(values, Layout::kColumnStride, value, key_stride, first, kColumns, problem.keys, problem);
    __syncthreads();
    if (first >= position + kWarpRows || first + kColumns <= lowest) continue;
    float scores[kWarpRows];
    dot_columns<kWidth>(scores, rows + warp * kWarpRows * kWidth, keys, problem);
    exponentiate<kWidth>(scores, softmax, out, first_key, position, first + lane, op.in);
    add_weighted<kWidth>(out, scores, weights, values);
  }
  float* log_sums = op.log_sums + work.head * problem.tokens + first_token;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    factors[r] = 1.0f / softmax[r].sum;
    if (lane == 0 && warp_query + r < problem.queries) {
      log_sums[warp_query + r] = softmax[r].top + logf(softmax[r].sum);
    }
  }
  store<Element, kWidth>(static_cast<Element*>(op.out) + first_token * problem.out_stride + column, problem.out_stride,
                         out, factors, warp_query, 0, problem.queries, problem);
}

// The dot product of a query's out and dout (which is in shared memory), in all lanes.
template <int kWidth, typename Element>
__device__ __forceinline__ float find_delta(const Element* out, const float* dout, const Problem& problem) {
  float sum = 0;
  for (int column = threadIdx.x % 32; column < problem.head_width; column += 32) {
    sum = __fmaf_rn(widened(out[column]), dout[column], sum);
  }
  return sum_of_lanes(sum);
}

template <typename Element, int kWidth, Side kSide>
__global__ void __launch_bounds__(Shared<kWidth>::kThreads, Shared<kWidth>::kBlocks)
    backward_kernel(Problem problem, Backward op) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Layout = Shared<kWidth>;
  constexpr bool kOfQueries = kSide == Side::kQueries;
  constexpr int kRows = Layout::kRows;
  const int group = problem.group, head_width = problem.head_width;
  const Work work = work_of(problem.order, blockIdx.x, kOfQueries ? problem.heads : problem.heads / group);
  const int first_row = (kOfQueries ? static_cast<int>(problem.order.tiles) - 1 - work.rank : work.rank) * kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = first_row + warp * kWarpRows;
  const int rows_end = kOfQueries ? problem.queries : problem.keys,
            columns_end = kOfQueries ? problem.keys : problem.queries;
  // Positions of the warp's first row, and of the first column.
  const int row_position = warp_row + (kOfQueries ? problem.first : 0),
            column_position = kOfQueries ? 0 : problem.first;
  const std::int64_t qkv_stride = problem.qkv_stride, out_stride = problem.out_stride, key_stride = op.in.key_stride;
  const int query_head = kOfQueries ? work.head : work.head * group,
            key_head = kOfQueries ? work.head / group : work.head;
  const std::int64_t first_token = std::int64_t{work.batch} * problem.queries;
  const std::int64_t column = std::int64_t{query_head} * head_width, key_column = std::int64_t{key_head} * head_width;
  const std::int64_t numbers_at = query_head * problem.tokens + first_token;
  const std::int64_t key_at = work.batch * problem.keys * key_stride + key_column;
  const Element* query = static_cast<const Element*>(op.in.qkv) + first_token * qkv_stride + column;
  const Element* key = static_cast<const Element*>(op.in.keys) + key_at;
  const Element* value = static_cast<const Element*>(op.in.values) + key_at;
  const Element* out = static_cast<const Element*>(op.out) + first_token * out_stride + column;
  const Element* dout = static_cast<const Element*>(op.dout) + first_token * out_stride + column;
  const float* log_sums = op.log_sums + numbers_at;
  float* delta = op.delta + numbers_at;

  float* tiles = reinterpret_cast<float*>(shared);
  float *rows_x = tiles + Layout::kRowsAt[0], *rows_y = tiles + Layout::kRowsAt[1];
  float *columns_x = tiles + Layout::kColumnsAt[0], *columns_y = tiles + Layout::kColumnsAt[1];
  float* weights = tiles + Layout::kWeightsAt + warp * kWarpRows * kColumns;
  const std::int64_t rows_x_stride = kOfQueries ? qkv_stride : key_stride;
  const std::int64_t rows_y_stride = kOfQueries ? out_stride : key_stride;
  load<kWidth>(rows_x, kWidth, kOfQueries ? query : key, rows_x_stride, first_row, kRows, rows_end, problem);
  load<kWidth>(rows_y, kWidth, kOfQueries ? dout : value, rows_y_stride, first_row, kRows, rows_end, problem);
  __syncthreads();
  const float *own_x = rows_x + warp * kWarpRows * kWidth, *own_y = rows_y + warp * kWarpRows * kWidth;

  // Of the rows, or below of the lane's column.
  const FirstKeys first_keys(op.in, problem, work.batch);
  float log_sum[kWarpRows] = {}, own_delta[kWarpRows] = {};
  int first_key[kWarpRows] = {};
  int begin = 0, end = 0, lowest = 0;
  if constexpr (kOfQueries) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int at = warp_row + r;
      if (at >= problem.queries) break;
      log_sum[r] = log_sums[at];
      first_key[r] = first_keys.of(at);
      own_delta[r] = find_delta<kWidth>(out + at * out_stride, own_y + r * kWidth, problem);
      if (lane == 0) delta[at] = own_delta[r];
    }
    lowest = first_keys.range(warp_row, kWarpRows).lowest;
    begin = first_keys.range(first_row, kRows).lowest / kColumns * kColumns;
    end = min(problem.first + first_row + kRows, problem.keys);
  } else {
    begin = max(first_row - problem.first, 0) / kColumns * kColumns;
    end = first_keys.end_of_queries(begin, min(first_row + kRows, problem.keys) - 1);
  }
  float sum_x[kWarpRows][kWidth / 32] = {}, sum_y[kWarpRows][kWidth / 32] = {};  // dQ or dK, / scale; dV
  const float inner = op.in.soft_cap != 0 ? op.in.scale / op.in.soft_cap : 0;
  for (int head = 0; head < (kOfQueries ? 1 : group); ++head) {
    const Element* columns_of_x = kOfQueries ? key : query + head * head_width;
    const Element* columns_of_y = kOfQueries ? value : dout + head * head_width;
    for (int first = begin; first < end; first += kColumns) {
      __syncthreads();
      load<kWidth>(columns_x, Layout::kColumnStride, columns_of_x, kOfQueries ? key_stride : qkv_stride, first,
                   kColumns, columns_end, problem);
      load<kWidth>(columns_y, Layout::kColumnStride, columns_of_y, kOfQueries ? key_stride : out_stride, first,
                   kColumns, columns_end, problem);
      __syncthreads();
      const int first_position = column_position + first;
      if (kOfQueries ? first_position >= row_position + kWarpRows || first_position + kColumns <= lowest
                     : first_position + kColumns <= row_position) {
        continue;
      }
      float scores[kWarpRows], dscores[kWarpRows];
      dot_columns<kWidth>(scores, own_x, columns_x, problem);
      dot_columns<kWidth>(dscores, own_y, columns_y, problem);
      if constexpr (!kOfQueries) {
        // Queries past the end of the sequence are zeros, and so is what they add.
        const bool valid = first + lane < problem.queries;
        log_sum[0] = valid ? log_sums[head * problem.tokens + first + lane] : 0;
        own_delta[0] = valid ? delta[head * problem.tokens + first + lane] : 0;
        first_key[0] = first_keys.of(first + lane);
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const int own = row_position + r, other = first_position + lane, of = kOfQueries ? r : 0;
        const int seen_key = kOfQueries ? other : own, seeing = kOfQueries ? own : other;
        float slope = 1;
        if (op.in.soft_cap != 0) {
          const float t = tanhf(scores[r] * inner);
          slope = 1 - t * t;
          scores[r] = op.in.soft_cap * t - log_sum[of];
        } else {
          scores[r] = __fmaf_rn(scores[r], op.in.scale, -log_sum[of]);
        }
        scores[r] = seen_key <= seeing && seen_key >= first_key[of] ? expf(scores[r]) : 0;
        dscores[r] = scores[r] * (dscores[r] - own_delta[of]) * slope;
      }
      if constexpr (!kOfQueries) add_weighted<kWidth>(sum_y, scores, weights, columns_y);
      add_weighted<kWidth>(sum_x, dscores, weights, columns_x);
    }
  }
  float scale = op.in.scale;
  if constexpr (!kOfQueries) {
    if (op.dkv != nullptr) {
      const std::int64_t keys_width = std::int64_t{problem.heads / group} * head_width;
      float* const dkey = op.dkv + key_column;
      add_to_rows<kWidth>(sum_x, scale, dkey, 2 * keys_width, warp_row, rows_end, head_width);
      add_to_rows<kWidth>(sum_y, 1, dkey + keys_width, 2 * keys_width, warp_row, rows_end, head_width);
      scale = 1;
    }
  }
  const float scales[kWarpRows] = {scale, scale, scale, scale};
  Element* dqkv = static_cast<Element*>(op.dqkv) + first_token * qkv_stride;
  if constexpr (kOfQueries) {
    store<Element, kWidth>(dqkv + column, qkv_stride, sum_x, scales, warp_row, 0, rows_end, problem);
  } else {
    const float ones[kWarpRows] = {1, 1, 1, 1};
    Element* const dkey = dqkv + out_stride + key_column;
    store<Element, kWidth>(dkey, qkv_stride, sum_x, scales, warp_row, problem.first, rows_end, problem);
    store<Element, kWidth>(dkey + (qkv_stride - out_stride) / 2, qkv_stride, sum_y, ones, warp_row, problem.first,
                           rows_end, problem);
  }
}

template <typename Element, int kWidth>
cudaError_t forward_of(const AttentionShape& shape, const Forward& op, cudaStream_t stream) {
  using Layout = Shared<kWidth>;
  return launch(forward_kernel<Element, kWidth>, problem_of(shape, op.in, Side::kQueries, Layout::kRows), op,
                Layout::kThreads, Layout::kBytes, stream);
}

// The pass of queries goes first: it leaves delta.
template <typename Element, int kWidth>
cudaError_t backward_of(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  using Layout = Shared<kWidth>;
  const auto pass = [&]<Side kSide>() {
    return launch(backward_kernel<Element, kWidth, kSide>, problem_of(shape, op.in, kSide, Layout::kRows), op,
                  Layout::kThreads, Layout::kBytes, stream);
  };
  const cudaError_t error = pass.template operator()<Side::kQueries>();
  return error != cudaSuccess ? error : pass.template operator()<Side::kKeys>();
}

// Calls `run` with the shape's element type and rounded head width as template arguments.
template <typename Run>
cudaError_t dispatch(const AttentionShape& shape, const Run& run) {
  const std::uint32_t head_width = shape.head_width;
  const auto of = [&]<typename Element>() {
    if (head_width <= 64) return run.template operator()<Element, 64>();
    if (head_width <= 128) return run.template operator()<Element, 128>();
    return run.template operator()<Element, 256>();
  };
  switch (shape.type) {
    case DType::kFloat32: return of.template operator()<float>();
    case DType::kBFloat16: return of.template operator()<__nv_bfloat16>();
    case DType::kFloat16: return of.template operator()<__half>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t forward_in_fp32(const AttentionShape& shape, const Forward& op, cudaStream_t stream) {
  return dispatch(shape,
                  [&]<typename Element, int kWidth>() { return forward_of<Element, kWidth>(shape, op, stream); });
}

cudaError_t backward_in_fp32(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  return dispatch(shape,
                  [&]<typename Element, int kWidth>() { return backward_of<Element, kWidth>(shape, op, stream); });
}

}  // namespace spillway::models::attention
