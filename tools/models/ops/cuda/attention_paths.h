// The two implementations behind attention.h. They take arguments that attention.cc has checked.
#pragma once

#include "tools/models/ops/cuda/attention.h"

namespace spillway::models::attention {

// What queries see, of what, and how scores are made.
struct Inputs {
  const void *qkv, *keys, *values;  // of the first token each
  std::int64_t key_stride;          // elements from the keys, or values, of a token to the next one's
  int first;                        // position of a row's first query; its first key has 0
  int window;                       // at least 1
  const std::uint32_t* starts;      // may be null
  float scale, soft_cap;            // soft_cap: 0 where there is none

  bool has_rules() const { return window != kNoWindow || starts != nullptr || soft_cap != 0; }
  static constexpr int kNoWindow = 0x7fffffff;
};

struct Forward {
  Inputs in;
  void* out;
  float* log_sums;
};

struct Backward {
  Inputs in;
  const void* out;
  const float* log_sums;
  const void* dout;
  void* dqkv;
  float* dkv;    // of a part, else null
  float* delta;  // [heads][M], written: the dot product of a query's out and dout
};

// 16-bit types, head width a multiple of 8 and at most 128; keys and values of a part aligned to 16 bytes.
cudaError_t forward_on_tensor_cores(const AttentionShape& shape, const Forward& op, cudaStream_t stream);
cudaError_t backward_on_tensor_cores(const AttentionShape& shape, const Backward& op, cudaStream_t stream);

// Any type, head width at most 256.
cudaError_t forward_in_fp32(const AttentionShape& shape, const Forward& op, cudaStream_t stream);
cudaError_t backward_in_fp32(const AttentionShape& shape, const Backward& op, cudaStream_t stream);

}  // namespace spillway::models::attention
