#include "tools/models/ops/cuda/attention.h"

#include "tools/models/ops/cuda/attention_paths.h"

namespace spillway::models {
namespace {

constexpr std::uint32_t kWidestHead = 256;

bool valid(const AttentionShape& shape) {
  return shape.heads > 0 && shape.width > 0 && shape.width % shape.heads == 0 &&
         shape.width / shape.heads <= kWidestHead;
}

bool aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

bool for_tensor_cores(const AttentionShape& shape) {
  const std::uint32_t head = shape.width / shape.heads;
  return shape.type != DType::kFloat32 && head % 8 == 0 && head <= 128;
}

bool empty(const AttentionShape& shape) { return shape.batch == 0 || shape.sequence == 0; }

}  // namespace

cudaError_t attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* log_sums,
                              cudaStream_t stream) {
  if (!valid(shape) || !aligned(qkv) || !aligned(out)) return cudaErrorInvalidValue;
  if (empty(shape)) return cudaSuccess;
  const attention::Forward op{qkv, out, log_sums};
  return for_tensor_cores(shape) ? attention::forward_on_tensor_cores(shape, op, stream)
                                 : attention::forward_in_fp32(shape, op, stream);
}

std::size_t attention_backward_scratch_bytes(const AttentionShape& shape) {
  const std::size_t bytes = std::size_t{shape.batch} * shape.sequence * shape.heads * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

cudaError_t attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* log_sums,
                               const void* dout, void* dqkv, void* scratch, cudaStream_t stream) {
  if (!valid(shape) || !aligned(qkv) || !aligned(out) || !aligned(dout) || !aligned(dqkv) || !aligned(scratch)) {
    return cudaErrorInvalidValue;
  }
  if (empty(shape)) return cudaSuccess;
  const attention::Backward op{qkv, out, log_sums, dout, dqkv, static_cast<float*>(scratch)};
  return for_tensor_cores(shape) ? attention::backward_on_tensor_cores(shape, op, stream)
                                 : attention::backward_in_fp32(shape, op, stream);
}

}  // namespace spillway::models
