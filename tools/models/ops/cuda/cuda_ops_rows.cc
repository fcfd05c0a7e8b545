// Operations on rows that decoders have.
#include <nvtx3/nvtx3.hpp>

#include "tools/models/ops/cuda/check.h"
#include "tools/models/ops/cuda/cuda_ops.h"
#include "tools/models/ops/cuda/layer_kernels.h"

namespace spillway::models {

using Range = nvtx3::scoped_range;

void CudaOps::require_rows(const void* data, std::size_t rows, std::size_t stride, std::size_t columns) const {
  require_in_hbm(data, ((rows - 1) * stride + columns) * element_bytes());
}

void CudaOps::run(const Embedding& op, Stream& stream) {
  const Range range("embedding");
  const std::size_t m = tokens(op.count), width = shape_.width;
  require_in_hbm(op.tokens, m * sizeof(std::uint32_t));
  require_tensor(op.token_weight, shape_.vocabulary * width);
  SPILLWAY_CHECK(op.position_weight == nullptr || op.scale == 1, "rows are scaled where no position is added");
  if (op.position_weight != nullptr) require_tensor(op.position_weight, shape_.positions * width);
  require_tensor(op.out, m * width);
  check(embedding(shape_, op, native(stream)), "the embedding");
}

void CudaOps::run(const EmbeddingBackward& op, Stream& stream) {
  const Range range("embedding backward");
  const std::size_t m = tokens(op.count), width = shape_.width;
  require_in_hbm(op.tokens, m * sizeof(std::uint32_t));
  require_tensor(op.dout, m * width);
  require_tensor(op.dtoken_weight, shape_.vocabulary * width, DType::kFloat32);
  if (op.dposition_weight != nullptr) require_tensor(op.dposition_weight, shape_.positions * width, DType::kFloat32);
  check(embedding_backward(shape_, op, shared_, native(stream)), "the embedding's gradient");
}

void CudaOps::run(const LayerNorm& op, Stream& stream) {
  const Range range("layer norm");
  const std::size_t m = tokens(op.count), elements = m * shape_.width;
  require_tensor(op.x, elements);
  require_tensor(op.out, elements);
  require_tensor(op.weight, shape_.width);
  require_tensor(op.bias, shape_.width);
  require_tensor(op.statistics, 2 * m, DType::kFloat32);
  check(layer_norm(shape_, op, native(stream)), "a layer norm");
}

void CudaOps::run(const LayerNormBackward& op, Stream& stream) {
  const Range range("layer norm backward");
  const std::size_t m = tokens(op.count), elements = m * shape_.width;
  require_tensor(op.x, elements);
  require_tensor(op.dout, elements);
  require_tensor(op.dx, elements);
  if (op.residual != nullptr) require_tensor(op.residual, elements);
  require_tensor(op.weight, shape_.width);
  require_tensor(op.statistics, 2 * m, DType::kFloat32);
  SPILLWAY_CHECK((op.dweight == nullptr) == (op.dbias == nullptr), "a layer norm is trained as a whole");
  if (op.dweight != nullptr) require_tensor(op.dweight, shape_.width, op.gradient);
  if (op.dbias != nullptr) require_tensor(op.dbias, shape_.width, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  check(layer_norm_backward(shape_, op, shared_, native(stream)), "a layer norm's gradient");
}

void CudaOps::run(const RmsNorm& op, Stream& stream) {
  const Range range("RMS norm");
  const std::size_t m = tokens(op.count), columns = std::size_t{op.groups} * op.columns;
  require_rows(op.x, m, op.x_stride, columns);
  require_rows(op.out, m, op.out_stride, columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, m * op.groups * sizeof(float));
  check(rms_norm(shape_, op, native(stream)), "an RMS norm");
}

void CudaOps::run(const RmsNormBackward& op, Stream& stream) {
  const Range range("RMS norm backward");
  const std::size_t m = tokens(op.count), columns = std::size_t{op.groups} * op.columns;
  require_rows(op.x, m, op.x_stride, columns);
  require_rows(op.dout, m, op.dout_stride, columns);
  require_rows(op.dx, m, op.dx_stride, columns);
  SPILLWAY_CHECK(op.residual == nullptr || op.groups == 1, "what is added to a gradient is one row a token");
  if (op.residual != nullptr) require_tensor(op.residual, m * op.columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, m * op.groups * sizeof(float));
  if (op.dweight != nullptr) require_tensor(op.dweight, op.columns, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  SPILLWAY_CHECK(rms_norm_backward_scratch_bytes(m * op.groups, op.columns) <= shared_bytes_,
                 "norms are of rows or of heads");
  check(rms_norm_backward(shape_, op, shared_, native(stream)), "an RMS norm's gradient");
}

void CudaOps::run(const Rotary& op, Stream& stream) {
  const Range range("rotary positions");
  const std::size_t m = tokens(op.count);
  require_rows(op.x, m, op.stride, std::size_t{op.heads} * op.head_width);
  SPILLWAY_CHECK(op.rotated % 2 == 0 && op.rotated <= op.head_width, "columns are turned in pairs");
  require_in_hbm(op.table, std::size_t{shape_.sequence} * op.rotated * sizeof(float));
  if (op.positions != nullptr) require_in_hbm(op.positions, m * sizeof(std::uint32_t));
  check(rotary(shape_, op, native(stream)), "rotary positions");
}

void CudaOps::run(const GatedActivation& op, Stream& stream) {
  const Range range("gated activation");
  const std::size_t m = tokens(op.count);
  require_tensor(op.gate_up, 2 * m * shape_.inner);
  require_tensor(op.out, m * shape_.inner);
  check(gated_activation(shape_, op, native(stream)), "a gated activation");
}

void CudaOps::run(const GatedActivationBackward& op, Stream& stream) {
  const Range range("gated activation backward");
  const std::size_t m = tokens(op.count);
  require_tensor(op.gate_up, 2 * m * shape_.inner);
  require_tensor(op.dout, m * shape_.inner);
  require_tensor(op.dgate_up, 2 * m * shape_.inner);
  check(gated_activation_backward(shape_, op, native(stream)), "a gated activation's gradient");
}

void CudaOps::run(const Add& op, Stream& stream) {
  const Range range("add");
  const std::size_t m = tokens(op.count);
  for (const void* tensor : {op.a, op.b, static_cast<const void*>(op.sum)}) {
    require_tensor(tensor, m * shape_.width);
  }
  check(add(shape_, op, native(stream)), "a sum");
}

void CudaOps::run(const Scale& op, Stream& stream) {
  const Range range("scale");
  const std::size_t elements = tokens(op.count) * op.columns;
  require_tensor(op.x, elements);
  require_tensor(op.out, elements);
  check(scale(shape_, op, native(stream)), "a scaling");
}

void CudaOps::run(const Gelu& op, Stream& stream) {
  const Range range("gelu");
  const std::size_t elements = tokens(op.count) * op.columns;
  require_tensor(op.before, elements);
  require_tensor(op.after, elements);
  check(gelu(shape_.type, op.before, op.after, elements, native(stream)), "gelu");
}

void CudaOps::run(const GeluBackward& op, Stream& stream) {
  const Range range("gelu backward");
  const std::size_t elements = tokens(op.count) * op.columns;
  require_tensor(op.before, elements);
  require_tensor(op.dx, elements);
  check(gelu_backward(shape_.type, op.before, op.dx, elements, native(stream)), "gelu's gradient");
}

void CudaOps::run(const CopyRows& op, Stream& stream) {
  const Range range("copy of rows");
  const std::size_t m = tokens(op.count);
  require_rows(op.from, m, op.from_stride, op.columns);
  require_rows(op.to, m, op.to_stride, op.columns);
  check(copy_rows(shape_, op, native(stream)), "a copy of rows");
}

}  // namespace spillway::models
