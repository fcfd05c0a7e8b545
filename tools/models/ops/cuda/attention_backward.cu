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
// Scores lie with the block's own rows down the registers of a warp, which makes them, rounded, the left operand of the
// next product: they never go through shared memory.
#include "tools/models/ops/cuda/attention_tile.cuh"

namespace spillway::models::attention {
namespace {

enum class Side { kQueries, kKeys };

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
  static_assert(kBytes <= 99 * 1024);
  static_assert(kOfQueries || (kStageNumbers == kThreads && kRows % kColumns == 0));
};

// What a step needs besides scores: for rows [i][half] (row 16 i + 8 half + lane / 4), or for columns [n][e] (column
// 8 n + 2 (lane % 4) + e) of the step, log_sums * log2(e) and delta.
template <int kWidth, Side kSide>
struct Numbers {
  using Layout = Shared<kWidth, kSide>;
  static constexpr bool kOfQueries = kSide == Side::kQueries;
  static constexpr int kOuter = kOfQueries ? Layout::kRowTiles : kStepTiles;
  float log_sum[kOuter][2], delta[kOuter][2];
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
      if (query < problem.sequence && column < problem.head_width) {
        left[pass] = *reinterpret_cast<const uint4*>(out + query * problem.width + column);
        right[pass] = *reinterpret_cast<const uint4*>(dout + query * problem.width + column);
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
        if (first + at < problem.sequence) delta[first + at] = sum;
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
      numbers.log_sum[i][half] = first + row < problem.sequence ? log_sums[first + row] * kLog2E : 0;
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

// scores become P; those of keys after the query, which includes all keys past the end, become zeros.
template <int kWidth, Side kSide>
__device__ __forceinline__ void find_probabilities(Accumulators<Shared<kWidth, kSide>::kRowTiles, kStepTiles>& scores,
                                                   const Numbers<kWidth, kSide>& numbers, float unit, bool masked,
                                                   int first_row, int first_column) {
  constexpr bool kOfQueries = kSide == Side::kQueries;
  const int lane = threadIdx.x % 32, row = first_row + lane / 4, column = first_column + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < Shared<kWidth, kSide>::kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float log_sum = kOfQueries ? numbers.log_sum[i][e / 2] : numbers.log_sum[n][e % 2];
        scores[i][n][e] = exp2_approximately(__fmaf_rn(scores[i][n][e], unit, -log_sum));
      }
    }
  }
  if (!masked) return;
#pragma unroll
  for (int i = 0; i < Shared<kWidth, kSide>::kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = row + 16 * i + e / 2 * 8, other = column + 8 * n + e % 2;
        if (kOfQueries ? other > own : own > other) scores[i][n][e] = 0;
      }
    }
  }
}

// dprobabilities become dS / scale.
template <int kWidth, Side kSide>
__device__ __forceinline__ void find_dscores(
    Accumulators<Shared<kWidth, kSide>::kRowTiles, kStepTiles>& dprobabilities,
    const Accumulators<Shared<kWidth, kSide>::kRowTiles, kStepTiles>& probabilities,
    const Numbers<kWidth, kSide>& numbers) {
#pragma unroll
  for (int i = 0; i < Shared<kWidth, kSide>::kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float delta = kSide == Side::kQueries ? numbers.delta[i][e / 2] : numbers.delta[n][e % 2];
        dprobabilities[i][n][e] = probabilities[i][n][e] * (dprobabilities[i][n][e] - delta);
      }
    }
  }
}

template <typename Element, int kWidth, Side kSide>
__global__ void __launch_bounds__(kThreads) backward_kernel(Problem problem, Backward op) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Layout = Shared<kWidth, kSide>;
  constexpr bool kOfQueries = kSide == Side::kQueries;
  constexpr int kRowTiles = Layout::kRowTiles, kRows = Layout::kRows, kColumns = Layout::kColumns;
  constexpr int kWarpRows = Layout::kWarpRows;
  // The last queries see most keys, the first keys are seen by most queries.
  const Work work = work_of(problem.order, blockIdx.x, problem.heads);
  const int first_row = (kOfQueries ? static_cast<int>(problem.order.tiles) - 1 - work.rank : work.rank) * kRows;
  const int warp = threadIdx.x / 32, warp_row = first_row + warp * kWarpRows;

  const std::int64_t width = problem.width, first_token = std::int64_t{work.batch} * problem.sequence;
  const std::int64_t column = work.head * problem.head_width, numbers_at = work.head * problem.tokens + first_token;
  const Element* query = static_cast<const Element*>(op.qkv) + first_token * 3 * width + column;
  const Element *key = query + width, *value = key + width;
  const Element* dout = static_cast<const Element*>(op.dout) + first_token * width + column;
  const float* log_sums = op.log_sums + numbers_at;
  float* delta = op.delta + numbers_at;
  const std::int64_t dout_stride = width, qkv_stride = 3 * width;

  const std::uint32_t rows_x = shared_address(shared), rows_y = rows_x + Layout::kRowsBytes;
  float* shared_numbers = reinterpret_cast<float*>(shared + Layout::kNumbersAt);
  const auto begin_columns = [&](int first, int stage) {
    const std::uint32_t x = rows_x + Layout::kStageAt + stage * 2 * Layout::kColumnsBytes;
    const std::uint32_t y = x + Layout::kColumnsBytes;
    begin_load<kWidth, kColumns>(x, kOfQueries ? key : query, qkv_stride, first, problem);
    begin_load<kWidth, kColumns>(y, kOfQueries ? value : dout, kOfQueries ? qkv_stride : dout_stride, first, problem);
    if constexpr (!kOfQueries) {
      const int number = threadIdx.x % kColumns;
      const bool valid = first + number < problem.sequence;
      const std::uint32_t to = shared_address(shared_numbers + stage * Layout::kStageNumbers + threadIdx.x);
      if (threadIdx.x < kColumns) {
        copy_4_bytes(to, log_sums + first + number, valid);
      } else {
        copy_4_bytes(to, delta + first + number, valid);
      }
    }
    commit_copies();
  };
  begin_load<kWidth, kRows>(rows_x, kOfQueries ? query : key, qkv_stride, first_row, problem);
  begin_load<kWidth, kRows>(rows_y, kOfQueries ? dout : value, kOfQueries ? dout_stride : qkv_stride, first_row,
                            problem);
  // Queries see columns up to their last one; keys are seen from their first one on.
  int first_column = kOfQueries ? 0 : first_row;
  const int columns_end = kOfQueries ? min(first_row + kRows, problem.sequence) : problem.sequence;
  begin_columns(first_column, 0);

  Numbers<kWidth, kSide> numbers;
  if constexpr (kOfQueries) {
    const Element* out = static_cast<const Element*>(op.out) + first_token * width + column;
    find_delta<Element, kWidth, kWarpRows>(shared_numbers + warp * kWarpRows, delta, out, dout, warp_row, problem);
    read_numbers(numbers, shared_numbers + warp * kWarpRows, log_sums, warp_row, problem);
  }
  Rows<kWidth, kRowTiles, Layout::kRowsInRegisters> own_x(Pieces<kWidth>::by_columns(rows_x, warp * kWarpRows));
  Rows<kWidth, kRowTiles, Layout::kRowsInRegisters> own_y(Pieces<kWidth>::by_columns(rows_y, warp * kWarpRows));
  wait_for_copies();
  __syncthreads();
  own_x.begin();
  own_y.begin();

  const float unit = problem.scale * kLog2E;
  Accumulators<kRowTiles, kWidth / 8> sum_x, sum_y;  // dQ or dK, / scale; dV
  clear<kRowTiles, kWidth / 8>(sum_x);
  clear<kRowTiles, kWidth / 8>(sum_y);
  for (int stage = 0; first_column < columns_end; first_column += kColumns, stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // this stage is there, and nobody reads the other one any more
    if (first_column + kColumns < columns_end) begin_columns(first_column + kColumns, stage ^ 1);
    const std::uint32_t x = rows_x + Layout::kStageAt + stage * 2 * Layout::kColumnsBytes;
    const std::uint32_t y = x + Layout::kColumnsBytes;
#pragma unroll 1
    for (int step = 0; step < kColumns; step += kStep) {
      const int at = first_column + step, last = at + kStep - 1, last_row = warp_row + kWarpRows - 1;
      // Some pair of a row and a column is visible; all are.
      const bool some = kOfQueries ? at <= last_row : last >= warp_row;
      const bool all = kOfQueries ? last <= warp_row : at >= last_row;
      if (!some) continue;
      float scores[kRowTiles][kStepTiles][4], dscores[kRowTiles][kStepTiles][4];
      dot_rows<Element>(scores, own_x, Pieces<kWidth>::by_rows(x, step), 0);
      dot_rows<Element>(dscores, own_y, Pieces<kWidth>::by_rows(y, step), 0);
      if constexpr (!kOfQueries) read_numbers(numbers, shared_numbers + stage * Layout::kStageNumbers, step);
      find_probabilities<kWidth, kSide>(scores, numbers, unit, !all, warp_row, at);
      if constexpr (!kOfQueries) add_weighted<Element>(sum_y, scores, Pieces<kWidth>::by_columns(y, step), 0);
      find_dscores<kWidth, kSide>(dscores, scores, numbers);
      add_weighted<Element>(sum_x, dscores, Pieces<kWidth>::by_columns(x, step), 0);
    }
  }

  // Into this warp's own rows, which nobody reads any more.
  float scales[kRowTiles][2], ones[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    scales[i][0] = scales[i][1] = problem.scale;
    ones[i][0] = ones[i][1] = 1;
  }
  unsigned char* tile_x = shared + warp * kWarpRows * kRowBytes<kWidth>;
  unsigned char* tile_y = tile_x + Layout::kRowsBytes;
  Element* dquery = static_cast<Element*>(op.dqkv) + first_token * 3 * width + column;
  __syncwarp();
  write_rows<Element, kWidth, kRowTiles>(tile_x, sum_x, scales);
  if constexpr (!kOfQueries) write_rows<Element, kWidth, kRowTiles>(tile_y, sum_y, ones);
  __syncwarp();
  store_rows<kWidth, kWarpRows>(tile_x, kOfQueries ? dquery : dquery + width, qkv_stride, warp_row, problem);
  if constexpr (!kOfQueries) {
    store_rows<kWidth, kWarpRows>(tile_y, dquery + 2 * width, qkv_stride, warp_row, problem);
  }
}

template <typename Element, int kWidth, Side kSide>
cudaError_t pass(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  using Layout = Shared<kWidth, kSide>;
  return launch(backward_kernel<Element, kWidth, kSide>, problem_of(shape, Layout::kRows), op, kThreads, Layout::kBytes,
                stream);
}

// That of queries goes first: it leaves delta.
template <typename Element, int kWidth>
cudaError_t passes(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  const cudaError_t error = pass<Element, kWidth, Side::kQueries>(shape, op, stream);
  return error != cudaSuccess ? error : pass<Element, kWidth, Side::kKeys>(shape, op, stream);
}

template <typename Element>
cudaError_t backward_of(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  const std::uint32_t head_width = shape.width / shape.heads;
  if (head_width <= 64) return passes<Element, 64>(shape, op, stream);
  if (head_width <= 96) return passes<Element, 96>(shape, op, stream);
  return passes<Element, 128>(shape, op, stream);
}

}  // namespace

cudaError_t backward_on_tensor_cores(const AttentionShape& shape, const Backward& op, cudaStream_t stream) {
  return shape.type == DType::kBFloat16 ? backward_of<__nv_bfloat16>(shape, op, stream)
                                        : backward_of<__half>(shape, op, stream);
}

}  // namespace spillway::models::attention
