// Backward on tensor cores. With P the probabilities, dP = dO · Vᵀ and dS = P (dP - delta), scaled scores' gradients:
//
//   dQ = dS · K        dK = dSᵀ · Q        dV = Pᵀ · dO
//
// Sums over keys belong to one block of queries, sums over queries to one block of keys, and nothing is added to across
// blocks: so there are two passes, and both compute S and dP (7 products, where atomic additions to dQ would need 5). A
// pass is the same program, with the two sides exchanged:
//
//                            rows of the block   stream past them   scores       written
//   Side::kQueries           Q, dO               K, V               S, dP        dQ, delta
//   Side::kKeys              K, V                Q, dO              Sᵀ, dPᵀ      dK, dV
//
// Past keys stream the queries of one head after the other, of all that share them. Capped scores are c tanh(s / c),
// and dS has the factor 1 - tanh² besides.
//
// Scores lie with the block's own rows down the registers of a warp, which makes them, rounded, the left operand of the
// next product: they never go through shared memory.
#include "tools/models/ops/cuda/attention_tile.cuh"

namespace spillway::models::attention {
namespace {

// Columns of the stream that are worked on at a time.
constexpr int kStep = 32, kStepTiles = kStep / 8;

template <int kWidth, Side kSide>
struct Shared {
  static constexpr bool kOfQueries = kSide == Side::kQueries;
  // As much as registers hold: two sums of a warp's rows for keys, one for queries.
  static constexpr int kRowTiles = kOfQueries || kWidth == 64 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kColumns = kOfQueries && kWidth == 128 ? 32 : 64;
  static constexpr bool kRowsInRegisters = kOfQueries && kWidth == 64;

  // rows x (Q or K), rows y (dO or V) | stage 0: columns x (K or Q), y (V or dO) | stage 1 | numbers
  static constexpr int kRowsBytes = kRows * kRowBytes<kWidth>, kColumnsBytes = kColumns * kRowBytes<kWidth>;
  static constexpr int kStageAt = 2 * kRowsBytes, kNumbersAt = kStageAt + 4 * kColumnsBytes;
  // Of queries: delta of the rows. Of keys: for each stage, log_sums and delta of the columns.
  static constexpr int kStageNumbers = 2 * kColumns, kNumbers = kOfQueries ? kRows : 2 * kStageNumbers;
  static constexpr int kBytes = kNumbersAt + kNumbers * static_cast<int>(sizeof(float));
  static_assert(kBytes <= 98 * 1024);  // and a KiB for FirstKeys' own
  static_assert(kOfQueries || (kStageNumbers == kThreads && kRows % kColumns == 0));
};

// What a step needs besides scores: for rows [i][half] (row 16 i + 8 half + lane / 4), or for columns [n][e] (column
// 8 n + 2 (lane % 4) + e) of the step, log_sums * log2(e) and delta; and the first keys that queries see: of rows
// likewise, of columns that of column `lane` in each lane.
template <int kWidth, Side kSide>
struct Numbers {
  using Layout = Shared<kWidth, kSide>;
  static constexpr bool kOfQueries = kSide == Side::kQueries;
  static constexpr int kOuter = kOfQueries ? Layout::kRowTiles : kStepTiles;
  float log_sum[kOuter][2], delta[kOuter][2];
  int first_key[kOfQueries ? kOuter : 1][kOfQueries ? 2 : 1];
};

template <typename Element>
__device__ __forceinline__ float dot_of_eight(const uint4& left, const uint4& right) {
  const std::uint32_t l[4] = {left.x, left.y, left.z, left.w}, r[4] = {right.x, right.y, right.z, right.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack(l[i], Element()), b = unpack(r[i], Element());
    sum = __fmaf_rn(a.x, b.x, sum);
    sum = __fmaf_rn(a.y, b.y, sum);
  }
  return sum;
}

// delta of a warp's queries, from `first` on, into shared and into global memory.
template <typename Element, int kWidth, int kWarpRows>
__device__ __forceinline__ void find_delta(float* shared_delta, float* delta, const Element* out, const Element* dout,
                                           int first, const Problem& problem) {
  constexpr int kGroup = kWidth == 64 ? 8 : 16;          // lanes of a row, 8 columns each
  constexpr int kPassRows = 32 / kGroup, kTogether = 4;  // passes whose loads are on their way at the same time
  static_assert(kWarpRows % (kPassRows * kTogether) == 0);
  const int lane = threadIdx.x % 32, column = lane % kGroup * 8;
#pragma unroll 1
  for (int row = lane / kGroup; row < kWarpRows; row += kPassRows * kTogether) {
    uint4 left[kTogether] = {}, right[kTogether] = {};
#pragma unroll
    for (int pass = 0; pass < kTogether; ++pass) {
      const int query = first + row + pass * kPassRows;
      if (query < problem.queries && column < problem.head_width) {
        left[pass] = *reinterpret_cast<const uint4*>(out + query * problem.out_stride + column);
        right[pass] = *reinterpret_cast<const uint4*>(dout + query * problem.out_stride + column);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kTogether; ++pass) {
      const int at = row + pass * kPassRows;
      float sum = dot_of_eight<Element>(left[pass], right[pass]);
#pragma unroll
      for (int distance = kGroup / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      if (column == 0) {
        shared_delta[at] = sum;
        if (first + at < problem.queries) delta[first + at] = sum;
      }
    }
  }
  __syncwarp();
}

// Of the warp's rows; zeros past the end of the sequence, where Q and dO are zeros too: such rows come out as zeros.
template <int kWidth>
__device__ __forceinline__ void read_numbers(Numbers<kWidth, Side::kQueries>& numbers, const float* shared_delta,
                                             const float* log_sums, int first, const Problem& problem) {
  using Layout = Shared<kWidth, Side::kQueries>;
#pragma unroll
  for (int i = 0; i < Layout::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
      numbers.log_sum[i][half] = first + row < problem.queries ? log_sums[first + row] * kLog2E : 0;
      numbers.delta[i][half] = shared_delta[row];
    }
  }
}

// Of a step's columns, the first of which is at `step` in the stage's numbers. Queries past the end: all zeros.
template <int kWidth>
__device__ __forceinline__ void read_numbers(Numbers<kWidth, Side::kKeys>& numbers, const float* stage, int step) {
  using Layout = Shared<kWidth, Side::kKeys>;
#pragma unroll
  for (int n = 0; n < kStepTiles; ++n) {
    const float* at = stage + step + 8 * n + threadIdx.x % 4 * 2;
    const float2 log_sum = *reinterpret_cast<const float2*>(at);
    const float2 delta = *reinterpret_cast<const float2*>(at + Layout::kColumns);
    numbers.log_sum[n][0] = log_sum.x * kLog2E, numbers.log_sum[n][1] = log_sum.y * kLog2E;
    numbers.delta[n][0] = delta.x, numbers.delta[n][1] = delta.y;
  }
}

template <int kWidth>
__device__ __forceinline__ void read_first_keys(Numbers<kWidth, Side::kQueries>& numbers, const FirstKeys& first_keys,
                                                int first) {
#pragma unroll
  for (int i = 0; i < 2 * Shared<kWidth, Side::kQueries>::kRowTiles; ++i) {
    numbers.first_key[i / 2][i % 2] = first_keys.of(first + 8 * i + static_cast<int>(threadIdx.x) % 32 / 4);
  }
}

// scores become P, dscores what dS / scale is of P. Of keys after the query, which includes all keys past the end, and
// before its first one: zeros. `row` and `column` are positions, of the warp's first row and the step's first column.
template <int kWidth, Side kSide, bool kRules>
__device__ __forceinline__ void find_probabilities(Accumulators<Shared<kWidth, kSide>::kRowTiles, kStepTiles>& scores,
                                                   Accumulators<Shared<kWidth, kSide>::kRowTiles, kStepTiles>& dscores,
                                                   const Numbers<kWidth, kSide>& numbers, const Inputs& in, bool masked,
                                                   int row, int column) {
  constexpr bool kOfQueries = kSide == Side::kQueries;
  constexpr int kRowTiles = Shared<kWidth, kSide>::kRowTiles;
  const bool capped = kRules && in.soft_cap != 0;
  const float unit = (capped ? 1.0f : in.scale) * kLog2E, inner = capped ? in.scale / in.soft_cap : 0.0f;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dscores[i][n][e] -= kOfQueries ? numbers.delta[i][e / 2] : numbers.delta[n][e % 2];
        if (capped) {
          const float t = tanhf(scores[i][n][e] * inner);
          scores[i][n][e] = in.soft_cap * t;
          dscores[i][n][e] *= 1 - t * t;
        }
        const float log_sum = kOfQueries ? numbers.log_sum[i][e / 2] : numbers.log_sum[n][e % 2];
        scores[i][n][e] = exp2_approximately(__fmaf_rn(scores[i][n][e], unit, -log_sum));
      }
    }
  }
  if (!masked) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_column = 8 * n + lane % 4 * 2 + e, other = column + of_column;
      int column_key = 0;
      if constexpr (kRules && !kOfQueries) column_key = __shfl_sync(kAllLanes, numbers.first_key[0][0], of_column);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = row + 16 * i + 8 * half + lane / 4;
          const int query = kOfQueries ? own : other, key = kOfQueries ? other : own;
          int first_key = column_key;
          if constexpr (kRules && kOfQueries) first_key = numbers.first_key[i][half];
          if (key > query || (kRules && key < first_key)) scores[i][n][2 * half + e] = 0;
        }
      }
    }
  }
}

// dscores become dS / scale.
template <int kRowTiles>
__device__ __forceinline__ void find_dscores(Accumulators<kRowTiles, kStepTiles>& dscores,
                                             const Accumulators<kRowTiles, kStepTiles>& probabilities) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dscores[i][n][e] *= probabilities[i][n][e];
    }
  }
}

// Adds a warp's sums, times `factor`, to rows `first` and on of fp32 [end][...], and takes what is there then.
template <int kWidth, int kRowTiles>
__device__ __forceinline__ void add_to_rows(Accumulators<kRowTiles, kWidth / 8>& sum, float factor, float* rows,
                                            std::int64_t stride, int first, int end, int head_width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = first + 8 * i + lane / 4;
    if (row >= end) continue;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column >= head_width) continue;
      auto* const at = reinterpret_cast<float2*>(rows + row * stride + column);
      float *const x = &sum[i / 2][n][i % 2 * 2], *const y = x + 1;
      const float2 old = *at;
      *x = __fmaf_rn(*x, factor, old.x);
      *y = __fmaf_rn(*y, factor, old.y);
      *at = {*x, *y};
    }
  }
}

// Of the columns that stream past: of which head of the group, and the first one's row.
struct Columns {
  int head, first;
};

template <typename Element, int kWidth, Side kSide, bool kRules>
__global__ void __launch_bounds__(kThreads) backward_kernel(Problem problem, Backward op) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Layout = Shared<kWidth, kSide>;
  constexpr bool kOfQueries = kSide == Side::kQueries;
  constexpr int kRowTiles = Layout::kRowTiles, kRows = Layout::kRows, kColumns = Layout::kColumns;
  constexpr int kWarpRows = Layout::kWarpRows;
  const int group = problem.group, head_width = problem.head_width, first = problem.first;
  // The last queries see most keys, the first keys are seen by most queries.
  const Work work = work_of(problem.order, blockIdx.x, kOfQueries ? problem.heads : problem.heads / group);
  const int first_row = (kOfQueries ? static_cast<int>(problem.order.tiles) - 1 - work.rank : work.rank) * kRows;
  const int warp = threadIdx.x / 32, warp_row = first_row + warp * kWarpRows;
  const int rows_end = kOfQueries ? problem.queries : problem.keys;

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
  const Element* dout = static_cast<const Element*>(op.dout) + first_token * out_stride + column;
  const float* log_sums = op.log_sums + numbers_at;
  float* delta = op.delta + numbers_at;
  const FirstKeys first_keys(op.in, problem, work.batch);

  const std::uint32_t rows_x = shared_address(shared), rows_y = rows_x + Layout::kRowsBytes;
  float* shared_numbers = reinterpret_cast<float*>(shared + Layout::kNumbersAt);
  const auto begin_columns = [&](const Columns& at, int stage) {
    const std::uint32_t x = rows_x + Layout::kStageAt + stage * 2 * Layout::kColumnsBytes;
    const std::uint32_t y = x + Layout::kColumnsBytes;
    if constexpr (kOfQueries) {
      begin_load<kWidth, kColumns>(x, key, key_stride, at.first, problem.keys, problem);
      begin_load<kWidth, kColumns>(y, value, key_stride, at.first, problem.keys, problem);
    } else {
      const std::int64_t head = std::int64_t{at.head} * head_width, numbers = at.head * problem.tokens;
      begin_load<kWidth, kColumns>(x, query + head, qkv_stride, at.first, problem.queries, problem);
      begin_load<kWidth, kColumns>(y, dout + head, out_stride, at.first, problem.queries, problem);
      const int number = at.first + static_cast<int>(threadIdx.x) % kColumns;
      const std::uint32_t to = shared_address(shared_numbers + stage * Layout::kStageNumbers + threadIdx.x);
      if (threadIdx.x < kColumns) {
        copy_4_bytes(to, log_sums + numbers + number, number < problem.queries);
      } else {
        copy_4_bytes(to, delta + numbers + number, number < problem.queries);
      }
    }
    commit_copies();
  };
  begin_load<kWidth, kRows>(rows_x, kOfQueries ? query : key, kOfQueries ? qkv_stride : key_stride, first_row, rows_end,
                            problem);
  begin_load<kWidth, kRows>(rows_y, kOfQueries ? dout : value, kOfQueries ? out_stride : key_stride, first_row,
                            rows_end, problem);
  commit_copies();
  // Queries see keys from their first one up to their own; keys are seen from their own query on.
  int begin = 0, end = 0;
  FirstKeys::Range seen{0, 0};
  if constexpr (kOfQueries) {
    end = min(first + first_row + kRows, problem.keys);
    if constexpr (kRules) {
      begin = first_keys.range(first_row, kRows).lowest / kColumns * kColumns;
      seen = first_keys.range(warp_row, kWarpRows);
    }
  } else {
    begin = max(first_row - first, 0) / kColumns * kColumns;
    end = problem.queries;
    if constexpr (kRules) end = first_keys.end_of_queries(begin, min(first_row + kRows, problem.keys) - 1);
  }
  const int heads = begin >= end ? 0 : kOfQueries ? 1 : group;
  const auto next = [&](const Columns& at) {
    return at.first + kColumns < end ? Columns{at.head, at.first + kColumns} : Columns{at.head + 1, begin};
  };
  if (heads > 0) begin_columns({0, begin}, 0);

  Numbers<kWidth, kSide> numbers;
  if constexpr (kOfQueries) {
    const Element* out = static_cast<const Element*>(op.out) + first_token * out_stride + column;
    find_delta<Element, kWidth, kWarpRows>(shared_numbers + warp * kWarpRows, delta, out, dout, warp_row, problem);
    read_numbers(numbers, shared_numbers + warp * kWarpRows, log_sums, warp_row, problem);
    if constexpr (kRules) read_first_keys(numbers, first_keys, warp_row);
  }
  Rows<kWidth, kRowTiles, Layout::kRowsInRegisters> own_x(Pieces<kWidth>::by_columns(rows_x, warp * kWarpRows));
  Rows<kWidth, kRowTiles, Layout::kRowsInRegisters> own_y(Pieces<kWidth>::by_columns(rows_y, warp * kWarpRows));
  wait_for_copies();
  __syncthreads();
  own_x.begin();
  own_y.begin();

  Accumulators<kRowTiles, kWidth / 8> sum_x, sum_y;  // dQ or dK, / scale; dV
  clear<kRowTiles, kWidth / 8>(sum_x);
  clear<kRowTiles, kWidth / 8>(sum_y);
  int stage = 0;
  for (Columns at{0, begin}; at.head < heads; at = next(at), stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // this stage is there, and nobody reads the other one any more
    if (const Columns then = next(at); then.head < heads) begin_columns(then, stage ^ 1);
    const std::uint32_t x = rows_x + Layout::kStageAt + stage * 2 * Layout::kColumnsBytes;
    const std::uint32_t y = x + Layout::kColumnsBytes;
#pragma unroll 1
    for (int step = 0; step < kColumns; step += kStep) {
      // Positions of the warp's first row and of the step's first column.
      const int row = warp_row + (kOfQueries ? first : 0), other = at.first + step + (kOfQueries ? 0 : first);
      const int last_row = row + kWarpRows - 1, last = other + kStep - 1;
      // Some pair of a row and a column is visible; all are.
      bool some = kOfQueries ? other <= last_row : last >= row, all = kOfQueries ? last <= row : other >= last_row;
      int of_lane = 0;  // the first key of query `lane` of the step
      if constexpr (kRules && kOfQueries) {
        some = some && last >= seen.lowest;
        all = all && other >= seen.highest;
      } else if constexpr (kRules) {
        of_lane = first_keys.of(at.first + step + static_cast<int>(threadIdx.x) % kStep);
        some = some && __any_sync(kAllLanes, of_lane <= last_row);
        all = all && !__any_sync(kAllLanes, of_lane > row);
      }
      if (!some) continue;
      float scores[kRowTiles][kStepTiles][4], dscores[kRowTiles][kStepTiles][4];
      dot_rows<Element>(scores, own_x, Pieces<kWidth>::by_rows(x, step), 0);
      dot_rows<Element>(dscores, own_y, Pieces<kWidth>::by_rows(y, step), 0);
      if constexpr (!kOfQueries) {
        read_numbers(numbers, shared_numbers + stage * Layout::kStageNumbers, step);
        if constexpr (kRules) numbers.first_key[0][0] = of_lane;
      }
      find_probabilities<kWidth, kSide, kRules>(scores, dscores, numbers, op.in, !all, row, other);
      if constexpr (!kOfQueries) add_weighted<Element>(sum_y, scores, Pieces<kWidth>::by_columns(y, step), 0);
      find_dscores<kRowTiles>(dscores, scores);
      add_weighted<Element>(sum_x, dscores, Pieces<kWidth>::by_columns(x, step), 0);
    }
  }

  float scale = op.in.scale;  // of sum_x
  if constexpr (!kOfQueries) {
    if (op.dkv != nullptr) {
      const std::int64_t keys_width = std::int64_t{problem.heads / group} * head_width;
      float* const dkey = op.dkv + key_column;
      add_to_rows<kWidth, kRowTiles>(sum_x, scale, dkey, 2 * keys_width, warp_row, rows_end, head_width);
      add_to_rows<kWidth, kRowTiles>(sum_y, 1, dkey + keys_width, 2 * keys_width, warp_row, rows_end, head_width);
      scale = 1;
    }
  }
  // Into this warp's own rows, which nobody reads any more.
  float scales[kRowTiles][2], ones[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    scales[i][0] = scales[i][1] = scale;
    ones[i][0] = ones[i][1] = 1;
  }
  unsigned char* tile_x = shared + warp * kWarpRows * kRowBytes<kWidth>;
  unsigned char* tile_y = tile_x + Layout::kRowsBytes;
  Element* dqkv = static_cast<Element*>(op.dqkv) + first_token * qkv_stride;
  __syncwarp();
  write_rows<Element, kWidth, kRowTiles>(tile_x, sum_x, scales);
  if constexpr (!kOfQueries) write_rows<Element, kWidth, kRowTiles>(tile_y, sum_y, ones);
  __syncwarp();
  if constexpr (kOfQueries) {
    store_rows<kWidth, kWarpRows>(tile_x, dqkv + column, qkv_stride, warp_row, 0, rows_end, problem);
  } else {
    Element* const dkey = dqkv + out_stride + key_column;
    Element* const dvalue = dkey + (qkv_stride - out_stride) / 2;
    store_rows<kWidth, kWarpRows>(tile_x, dkey, qkv_stride, warp_row, first, rows_end, problem);
    store_rows<kWidth, kWarpRows>(tile_y, dvalue, qkv_stride, warp_row, first, rows_end, problem);
  }
}

template <typename Element, int kWidth, Side kSide>
cudaError_t pass(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  using Layout = Shared<kWidth, kSide>;
  const auto kernel = op.in.has_rules() ? backward_kernel<Element, kWidth, kSide, true>
                                        : backward_kernel<Element, kWidth, kSide, false>;
  return launch(kernel, problem_of(shape, op.in, kSide, Layout::kRows), op, kThreads, Layout::kBytes, stream);
}

// That of queries goes first: it leaves delta.
template <typename Element, int kWidth>
cudaError_t passes(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  const cudaError_t error = pass<Element, kWidth, Side::kQueries>(shape, op, stream);
  return error != cudaSuccess ? error : pass<Element, kWidth, Side::kKeys>(shape, op, stream);
}

template <typename Element>
cudaError_t backward_of(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  if (shape.head_width <= 64) return passes<Element, 64>(shape, op, stream);
  if (shape.head_width <= 96) return passes<Element, 96>(shape, op, stream);
  return passes<Element, 128>(shape, op, stream);
}

}  // namespace

cudaError_t backward_on_tensor_cores(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  return shape.type == DType::kBFloat16 ? backward_of<__nv_bfloat16>(shape, op, stream)
                                        : backward_of<__half>(shape, op, stream);
}

}  // namespace spillway::models::attention
