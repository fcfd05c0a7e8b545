// Causal self-attention on the GPU, flash style: scores never leave the chip. Enqueues on the stream, allocates nothing,
// uses no atomics: the same bits every time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "spillway/dtype.h"

namespace spillway::gpt2 {

struct AttentionShape {
  DType type = DType::kFloat32;
  std::uint32_t batch = 1, sequence = 0, width = 0, heads = 0;
};

// qkv [M][3 width], rows of query | key | value; out [M][width]; log_sums fp32 [heads][M]: the natural logarithm of a
// query's sum of exponentials of scaled scores.
cudaError_t attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* log_sums,
                              cudaStream_t stream);

// Of device memory, aligned to 256, that attention_backward works in.
std::size_t attention_backward_scratch_bytes(const AttentionShape& shape);
// dqkv [M][3 width] is written whole.
cudaError_t attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* log_sums,
                               const void* dout, void* dqkv, void* scratch, cudaStream_t stream);

}  // namespace spillway::gpt2
