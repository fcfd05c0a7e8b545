// Causal self-attention on the GPU, flash style: scores never leave the chip. Enqueues on the stream of the current
// device, allocates nothing, uses no atomics: the same bits every time.
//
// 16-bit tensors whose head width is a multiple of 8 up to 128 go through the tensor cores: sums in fp32, but
// probabilities and their gradients are rounded to the tensor type before the product that takes them (each term of the
// sum is then off by up to 2^-9 of itself in bf16, 2^-12 in fp16), as in FlashAttention-2 (arXiv:2307.08691).
// Everything else is computed in plain fp32. Results are rounded once.
//
// Returned are errors of the arguments (cudaErrorInvalidValue: nothing was enqueued) and of the launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "spillway/dtype.h"

namespace spillway::models {

// M = batch * sequence tokens; rows of the batch do not see each other. Head h is columns [h * width / heads,
// (h + 1) * width / heads) of query, key and value; heads divides width; a head is at most 256 wide.
struct AttentionShape {
  DType type = DType::kFloat32;
  std::uint32_t batch = 1, sequence = 0, width = 0, heads = 0;
};

// qkv [M][3 width], rows of query | key | value; out [M][width]; log_sums fp32 [heads][M]: the natural logarithm of a
// query's sum of exponentials of scaled scores. Tensors are device memory aligned to 16 bytes; out and log_sums overlap
// nothing.
cudaError_t attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* log_sums,
                              cudaStream_t stream);

// Of device memory, aligned to 256, that attention_backward works in: 4 bytes for each head of each token.
std::size_t attention_backward_scratch_bytes(const AttentionShape& shape);
// dqkv [M][3 width] is written whole. `out` and `log_sums` are what attention_forward left. dqkv and scratch overlap
// nothing.
cudaError_t attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* log_sums,
                               const void* dout, void* dqkv, void* scratch, cudaStream_t stream);

}  // namespace spillway::models
