// The two implementations behind attention.h. They take shapes that attention.cc has checked.
#pragma once

#include "tools/models/ops/cuda/attention.h"

namespace spillway::models::attention {

struct Forward {
  const void* qkv;
  void* out;
  float* log_sums;
};

struct Backward {
  const void *qkv, *out;
  const float* log_sums;
  const void* dout;
  void* dqkv;
  float* delta;  // [heads][M], written: the dot product of a query's out and dout
};

// 16-bit types, head width a multiple of 8 and at most 128.
cudaError_t forward_on_tensor_cores(const AttentionShape& shape, const Forward& op, cudaStream_t stream);
cudaError_t backward_on_tensor_cores(const AttentionShape& shape, const Backward& op, cudaStream_t stream);

// Any type, head width at most 256.
cudaError_t forward_in_fp32(const AttentionShape& shape, const Forward& op, cudaStream_t stream);
cudaError_t backward_in_fp32(const AttentionShape& shape, const Backward& op, cudaStream_t stream);

}  // namespace spillway::models::attention
