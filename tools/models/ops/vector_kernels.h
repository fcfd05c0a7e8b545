// The inner loops of the host operations: everything that is not GEMM. Each runs on the calling thread over memory that
// the caller has split by shape.
//
// Compiled once per instruction set and chosen at run time (Highway's dispatch). Only correctly rounded operations in a
// fixed order are used (no fma, sixteen accumulators whatever the vector length), so every instruction set gives the
// same bits. `T` below is the tensor type of the table: float, bf16 or fp16. All arithmetic is fp32; a result is
// rounded once, when it is stored. Buffers may have any alignment and must not overlap unless a comment says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "spillway/dtype.h"

namespace spillway::models {

// Columns of a packed panel and of a GEMM result tile.
inline constexpr std::size_t kPanel = 64;

struct LayerNormStatistics {
  float mean, rstd;
};

// The first of rows that are `stride` elements apart.
struct RowsOf {
  const void* first;
  std::size_t stride;
};

struct VectorKernels {
  void (*widen)(const void* in, float* out, std::size_t count);
  void (*narrow)(const float* in, void* out, std::size_t count);
  void (*add)(const void* a, const void* b, void* out, std::size_t count);  // out may be a or b
  void (*accumulate)(const void* in, float* sum, std::size_t count);
  void (*scale)(const void* in, float factor, void* out, std::size_t count);
  void (*accumulate_scaled)(const void* in, float factor, float* sum, std::size_t count);

  LayerNormStatistics (*layer_norm)(const void* x, const void* weight, const void* bias, void* y, std::size_t count,
                                    float epsilon);
  // dx = gradient through the normalization + residual (may be null, may be dx itself).
  void (*layer_norm_backward)(const void* x, const void* weight, const void* dy, const void* residual, void* dx,
                              std::size_t count, LayerNormStatistics statistics);
  // Sums over `rows` of `columns` <= kPanel neighbouring columns: dweight += dy * normalized x, dbias += dy.
  void (*layer_norm_backward_columns)(const void* x, const void* dy, std::size_t stride, std::size_t rows,
                                      std::size_t columns, const LayerNormStatistics* statistics, float* dweight,
                                      float* dbias);

  // y = x / rms(x) * (weight + offset), may be x; returns 1 / rms.
  float (*rms_norm)(const void* x, const void* weight, float offset, void* y, std::size_t count, float epsilon);
  // As layer_norm_backward; dx may be dy, too.
  void (*rms_norm_backward)(const void* x, const void* weight, float offset, const void* dy, const void* residual,
                            void* dx, std::size_t count, float rstd);
  // dweight += dy * x * rstd over `rows`, `columns` <= kPanel. Rows' statistics are statistics_stride apart.
  void (*rms_norm_backward_columns)(const RowsOf& x, const RowsOf& dy, std::size_t rows, std::size_t columns,
                                    const float* statistics, std::size_t statistics_stride, float* dweight);

  // x[i] and x[i + half], of i < half, turned in place by the angle of cosine angles[2 i] and sine angles[2 i + 1].
  void (*rotate)(void* x, const float* angles, std::size_t half, bool backward);

  void (*gelu)(const void* x, void* y, std::size_t count);
  void (*gelu_backward)(const void* x, const void* dy, void* dx, std::size_t count);  // dx may be dy

  // By Activation (ops.h): out = activation(gate) * up; dgate may be gate, dup may be up.
  void (*gated[3])(const void* gate, const void* up, void* out, std::size_t count);
  void (*gated_backward[3])(const void* gate, const void* up, const void* dout, void* dgate, void* dup,
                            std::size_t count);

  // A softmax down the columns of scores that come tile by tile, tile[rows][kPanel], row r being key first_key + r and
  // column c query first_query + c:
  //   1. hide    of a tile with keys that not every query sees: query c sees those of [lows[c], itself]; lows may be
  //   null
  //   2. column_maximum        maximum[c] = the larger one of it and of column c
  //   3. column_exponentials   tile = e^((tile - maximum) * scale), sum[c] += column c; zero where it is hidden
  // Probabilities are exponentials over their sum.
  void (*hide)(float* tile, std::size_t rows, std::size_t first_key, std::size_t first_query,
               const std::uint32_t* lows);
  void (*column_maximum)(const float* tile, std::size_t rows, float* maximum);
  void (*column_exponentials)(float* tile, std::size_t rows, const float* maximum, float scale, float* sum);
  // And its gradient: dots[c] += column c of probabilities * dprobabilities, and then, written over dprobabilities,
  // probabilities * (dprobabilities - dot) * scale.
  void (*column_dots)(const float* probabilities, const float* dprobabilities, std::size_t rows, float* dots);
  void (*softmax_gradient)(const float* probabilities, float* dprobabilities, std::size_t rows, const float* dot,
                           float scale);
  // tile[r][c] *= factor[c]
  void (*scale_columns)(float* tile, std::size_t rows, const float* factor);
  // tile = cap * tanh(tile * scale / cap); slopes, unless null: 1 - tanh².
  void (*soft_cap)(float* tile, std::size_t rows, float scale, float cap, float* slopes);
  // slopes = 1 - (tile / cap)², of what soft_cap made
  void (*soft_cap_slopes)(const float* tile, std::size_t rows, float cap, float* slopes);
  // tile *= slopes * scale
  void (*scale_tile)(float* tile, const float* slopes, std::size_t rows, float scale);
  // Maximum, and sum of exp(x - maximum), of each column of tile[rows][kPanel].
  void (*column_statistics)(const float* tile, std::size_t rows, float* maximum, float* sum);
  // tile[r][c] = exp(tile[r][c] - log_sum[c]) * scale
  void (*column_probabilities)(float* tile, std::size_t rows, const float* log_sum, float scale);

  // sum[c] += x[r][c] over `rows`, `columns` <= kPanel.
  void (*column_sums)(const void* x, std::size_t stride, std::size_t rows, std::size_t columns, float* sum);

  // out[r][c] = tile[r][c] + bias[c] + residual[r][c]; bias and residual may be null; out and residual have `stride`.
  void (*store_tile)(const float* tile, std::size_t rows, std::size_t columns, const void* bias, const void* residual,
                     void* out, std::size_t stride);
  // out[c][r] = tile[r][c]: rows of the tile become columns.
  void (*store_transposed)(const float* tile, std::size_t rows, std::size_t columns, void* out, std::size_t stride);
  // A tile as operands of products: rows[r][c], and panel as pack() makes it, of T. Either may be null.
  void (*pack_tile)(const float* tile, std::size_t rows, void* by_row, void* panel);
  void (*transpose)(const void* in, std::size_t in_stride, std::size_t rows, std::size_t columns, void* out,
                    std::size_t out_stride);
  void (*transpose_widen)(const void* in, std::size_t in_stride, std::size_t rows, std::size_t columns, float* out,
                          std::size_t out_stride);

  // Right-hand operands of PanelGemm, zero-filled to kPanel columns and padded_depth() rows.
  // pack: panel[k][c] = x[k][c]; pack_transposed: panel[k][c] = x[c][k].
  void (*pack)(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, void* panel);
  void (*pack_transposed)(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, void* panel);
  // The same into an fp32 panel, whatever T is.
  void (*pack_widen)(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, float* panel);
  void (*pack_transposed_widen)(const void* x, std::size_t stride, std::size_t depth, std::size_t columns,
                                float* panel);
};

// Rows of a packed panel: oneDNN's blocked layouts come in 16 rows (fp32) and 16 pairs of rows (bf16).
constexpr std::size_t padded_depth(std::size_t depth) { return (depth + 31) / 32 * 32; }

// The best instruction set of this machine.
const VectorKernels& vector_kernels(DType type);

// The instruction sets this machine can run, for tests.
struct VectorTarget {
  const char* name;
  const VectorKernels* kernels;
};
std::vector<VectorTarget> vector_targets(DType type);

}  // namespace spillway::models
