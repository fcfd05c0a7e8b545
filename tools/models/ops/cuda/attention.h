// Causal self-attention on the GPU, flash style: scores never leave the chip. Enqueues on the stream of the current
// device, allocates nothing, uses no atomics: the same bits every time.
//
// 16-bit tensors whose head width is a multiple of 8 up to 128 go through the tensor cores: sums in fp32, but
// probabilities and their gradients are rounded to the tensor type before the product that takes them (each term of the
// sum is then off by up to 2^-9 of itself in bf16, 2^-12 in fp16), as in FlashAttention-2 (arXiv:2307.08691).
// Everything else is computed in plain fp32. Results are rounded once.
//
// Of keys that none of a block's queries sees (outside a window, or before the starts of documents) nothing is read.
//
// Returned are errors of the arguments (cudaErrorInvalidValue: nothing was enqueued) and of the launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "spillway/dtype.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

inline constexpr std::uint32_t kWidestHead = 256;

// M = batch * sequence tokens; rows of the batch do not see each other. With a part of a row (ops.h): 1, and the part's
// tokens. key_heads divides heads.
struct AttentionShape {
  DType type = DType::kFloat32;
  std::uint32_t batch = 1, sequence = 0, heads = 0, key_heads = 0, head_width = 0;

  std::int64_t query_width() const { return std::int64_t{heads} * head_width; }
  std::int64_t key_width() const { return std::int64_t{key_heads} * head_width; }
  std::int64_t qkv_width() const { return query_width() + 2 * key_width(); }
  std::int64_t tokens() const { return std::int64_t{batch} * sequence; }
};

// Tensors are device memory aligned to 16 bytes; a part's keys and values to their elements. `count` is the shape's to
// say. log_sums: fp32 [heads][M], the natural logarithm of a query's sum of exponentials of scores.
cudaError_t attention_forward(const AttentionShape& shape, const Attention& op, cudaStream_t stream);

// Of device memory, aligned to 256, that attention_backward works in: 4 bytes for each head of each token.
std::size_t attention_backward_scratch_bytes(const AttentionShape& shape);
// dqkv is written whole. `out` and `log_sums` are what attention_forward left.
cudaError_t attention_backward(const AttentionShape& shape, const AttentionBackward& op, void* scratch,
                               cudaStream_t stream);

}  // namespace spillway::models
