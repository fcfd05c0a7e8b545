// The GPU's kernels that are no matrix products; private to tools/models/ops/cuda. Each enqueues on the stream,
// allocates nothing and uses no atomics: how sums are split depends on the shape alone, so the bits are the same every
// time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/models/ops/ops.h"

namespace spillway::models {

// Of an operation with this `count`.
inline std::size_t tokens_of(const Shape& shape, std::uint32_t count) { return count != 0 ? count : shape.tokens(); }

cudaError_t embedding(const Shape& shape, const Embedding& op, cudaStream_t stream);
std::size_t embedding_backward_scratch_bytes(const Shape& shape);
cudaError_t embedding_backward(const Shape& shape, const EmbeddingBackward& op, void* scratch, cudaStream_t stream);

// Whether rows of this width can be normalized: they are kept in the registers of one block.
bool layer_norm_fits(const Shape& shape);
cudaError_t layer_norm(const Shape& shape, const LayerNorm& op, cudaStream_t stream);
std::size_t layer_norm_backward_scratch_bytes(const Shape& shape);
cudaError_t layer_norm_backward(const Shape& shape, const LayerNormBackward& op, void* scratch, cudaStream_t stream);

cudaError_t rms_norm(const Shape& shape, const RmsNorm& op, cudaStream_t stream);
std::size_t rms_norm_backward_scratch_bytes(std::size_t rows, std::size_t columns);
cudaError_t rms_norm_backward(const Shape& shape, const RmsNormBackward& op, void* scratch, cudaStream_t stream);
cudaError_t rotary(const Shape& shape, const Rotary& op, cudaStream_t stream);
cudaError_t gated_activation(const Shape& shape, const GatedActivation& op, cudaStream_t stream);
cudaError_t gated_activation_backward(const Shape& shape, const GatedActivationBackward& op, cudaStream_t stream);
cudaError_t add(const Shape& shape, const Add& op, cudaStream_t stream);
cudaError_t scale(const Shape& shape, const Scale& op, cudaStream_t stream);
cudaError_t copy_rows(const Shape& shape, const CopyRows& op, cudaStream_t stream);

// after = gelu(before); dx = dx * gelu'(before). Tensors of `count` elements.
cudaError_t gelu(DType type, const void* before, void* after, std::size_t count, cudaStream_t stream);
cudaError_t gelu_backward(DType type, const void* before, void* dx, std::size_t count, cudaStream_t stream);

// Where sums over rows go. accumulate: added to (fp32 only).
struct SumTarget {
  void* to;
  DType type;
  bool accumulate;
};
// to[c] = the sum over r of x[r][c], for rows that are `stride` elements apart.
struct ColumnSums {
  DType type;
  const void* x;
  std::size_t rows, columns, stride;
  SumTarget target;
};
std::size_t column_sums_scratch_bytes(std::size_t rows, std::size_t columns);
cudaError_t column_sums(const ColumnSums& op, void* scratch, cudaStream_t stream);
// The second half of such sums: targets[i] takes the sum over r of partial[i][r][c], fp32.
cudaError_t finish_sums(const float* partial, std::size_t rows, std::size_t columns, const SumTarget (&targets)[2],
                        unsigned count, cudaStream_t stream);

// Of the head, whose logits become soft_cap * tanh(logit / soft_cap) where soft_cap is not 0: logits fp32
// [rows][stride] of `rows` tokens, which become their gradients, in the tensor type, written over them. In 16 bits a
// row's gradients take the first half of its bytes: their stride is twice as many elements. `stride` is a multiple of
// 4; nothing is said of columns from the vocabulary on.
struct HeadRows {
  DType type;
  std::size_t rows, vocabulary, stride;
  float* logits;
  const std::uint32_t* targets;
  float* losses;
  float scale;
  float soft_cap;
};
cudaError_t head_gradients(const HeadRows& op, cudaStream_t stream);
cudaError_t cap_logits(float* logits, std::size_t count, float soft_cap, cudaStream_t stream);

}  // namespace spillway::models
