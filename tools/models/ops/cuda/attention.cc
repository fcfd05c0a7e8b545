#include "tools/models/ops/cuda/attention.h"

#include <cmath>

#include "tools/models/ops/cuda/attention_paths.h"

namespace spillway::models {
namespace {

bool aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

bool valid(const AttentionShape& shape, const AttentionPart& part) {
  const bool whole_groups = shape.key_heads > 0 && shape.heads > 0 && shape.heads % shape.key_heads == 0;
  const bool of_part = part.count == 0 || (shape.batch == 1 && shape.sequence == part.count && part.keys != nullptr &&
                                           part.values != nullptr && part.first <= 0x7fffffffu - part.count);
  return whole_groups && of_part && shape.head_width > 0 && shape.head_width <= kWidestHead;
}

bool empty(const AttentionShape& shape) { return shape.batch == 0 || shape.sequence == 0; }

attention::Inputs inputs_of(const AttentionShape& shape, const void* qkv, const AttentionRules& rules,
                            const AttentionPart& part) {
  const auto* row = static_cast<const std::byte*>(qkv);
  const std::size_t element = size_of(shape.type);
  attention::Inputs in{};
  in.qkv = qkv;
  in.keys = part.count != 0 ? part.keys : row + shape.query_width() * element;
  in.values = part.count != 0 ? part.values : row + (shape.query_width() + shape.key_width()) * element;
  in.key_stride = part.count != 0 ? static_cast<std::int64_t>(part.stride) : shape.qkv_width();
  in.first = part.count != 0 ? static_cast<int>(part.first) : 0;
  constexpr auto kNoWindow = static_cast<std::uint32_t>(attention::Inputs::kNoWindow);
  in.window = static_cast<int>(rules.window == 0 || rules.window > kNoWindow ? kNoWindow : rules.window);
  in.starts = rules.starts;
  in.scale = rules.scale != 0 ? rules.scale : 1.0f / std::sqrt(static_cast<float>(shape.head_width));
  in.soft_cap = rules.soft_cap;
  return in;
}

bool for_tensor_cores(const AttentionShape& shape, const attention::Inputs& in) {
  return shape.type != DType::kFloat32 && shape.head_width % 8 == 0 && shape.head_width <= 128 &&
         in.key_stride % 8 == 0 && aligned(in.keys) && aligned(in.values);
}

}  // namespace

cudaError_t attention_forward(const AttentionShape& shape, const Attention& op, cudaStream_t stream) {
  if (!valid(shape, op.part) || !aligned(op.qkv) || !aligned(op.out)) return cudaErrorInvalidValue;
  if (empty(shape)) return cudaSuccess;
  const attention::Forward forward{inputs_of(shape, op.qkv, op.rules, op.part), op.out, op.log_sums};
  return for_tensor_cores(shape, forward.in) ? attention::forward_on_tensor_cores(shape, forward, stream)
                                             : attention::forward_in_fp32(shape, forward, stream);
}

std::size_t attention_backward_scratch_bytes(const AttentionShape& shape) {
  const std::size_t bytes = static_cast<std::size_t>(shape.tokens()) * shape.heads * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

cudaError_t attention_backward(const AttentionShape& shape, const AttentionBackward& op, void* scratch,
                               cudaStream_t stream) {
  for (const void* tensor : {op.qkv, op.out, op.dout, static_cast<const void*>(op.dqkv),
                             static_cast<const void*>(op.dkv), static_cast<const void*>(scratch)}) {
    if (!aligned(tensor)) return cudaErrorInvalidValue;
  }
  if (!valid(shape, op.part) || (op.part.count != 0) != (op.dkv != nullptr)) return cudaErrorInvalidValue;
  if (empty(shape)) return cudaSuccess;
  const attention::Backward backward{.in = inputs_of(shape, op.qkv, op.rules, op.part),
                                     .out = op.out,
                                     .log_sums = op.log_sums,
                                     .dout = op.dout,
                                     .dqkv = op.dqkv,
                                     .dkv = op.dkv,
                                     .delta = static_cast<float*>(scratch)};
  return for_tensor_cores(shape, backward.in) ? attention::backward_on_tensor_cores(shape, backward, stream)
                                              : attention::backward_in_fp32(shape, backward, stream);
}

}  // namespace spillway::models
