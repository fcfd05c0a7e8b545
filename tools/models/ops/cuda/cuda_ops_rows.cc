// Operations on rows that decoders have.
#include <nvtx3/nvtx3.hpp>

#include "tools/models/ops/cuda/check.h"
#include "tools/models/ops/cuda/cuda_ops.h"
#include "tools/models/ops/cuda/layer_kernels.h"

namespace spillway::models {

using Range = nvtx3::scoped_range;

void CudaOps::require_rows(const void* data, std::size_t stride, std::size_t columns) const {
  require_in_hbm(data, ((shape_.tokens() - 1) * stride + columns) * element_bytes());
}

void CudaOps::run(const RmsNorm& op, Stream& stream) {
  const Range range("RMS norm");
  const std::size_t columns = std::size_t{op.groups} * op.columns;
  require_rows(op.x, op.x_stride, columns);
  require_rows(op.out, op.out_stride, columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, shape_.tokens() * op.groups * sizeof(float));
  check(rms_norm(shape_, op, native(stream)), "an RMS norm");
}

void CudaOps::run(const RmsNormBackward& op, Stream& stream) {
  const Range range("RMS norm backward");
  const std::size_t columns = std::size_t{op.groups} * op.columns;
  require_rows(op.x, op.x_stride, columns);
  require_rows(op.dout, op.dout_stride, columns);
  require_rows(op.dx, op.dx_stride, columns);
  SPILLWAY_CHECK(op.residual == nullptr || op.groups == 1, "what is added to a gradient is one row a token");
  if (op.residual != nullptr) require_tensor(op.residual, shape_.tokens() * op.columns);
  require_tensor(op.weight, op.columns);
  require_in_hbm(op.statistics, shape_.tokens() * op.groups * sizeof(float));
  require_tensor(op.dweight, op.columns, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  SPILLWAY_CHECK(rms_norm_backward_scratch_bytes(shape_.tokens() * op.groups, op.columns) <= shared_bytes_,
                 "norms are of rows or of heads");
  check(rms_norm_backward(shape_, op, shared_, native(stream)), "an RMS norm's gradient");
}

void CudaOps::run(const Rotary& op, Stream& stream) {
  const Range range("rotary positions");
  require_rows(op.x, op.stride, std::size_t{op.heads} * op.head_width);
  SPILLWAY_CHECK(op.rotated % 2 == 0 && op.rotated <= op.head_width, "columns are turned in pairs");
  require_in_hbm(op.table, std::size_t{shape_.sequence} * op.rotated * sizeof(float));
  if (op.positions != nullptr) require_in_hbm(op.positions, shape_.tokens() * sizeof(std::uint32_t));
  check(rotary(shape_, op, native(stream)), "rotary positions");
}

void CudaOps::run(const GatedActivation& op, Stream& stream) {
  const Range range("gated activation");
  require_tensor(op.gate_up, 2 * shape_.tokens() * shape_.inner);
  require_tensor(op.out, shape_.tokens() * shape_.inner);
  check(gated_activation(shape_, op, native(stream)), "a gated activation");
}

void CudaOps::run(const GatedActivationBackward& op, Stream& stream) {
  const Range range("gated activation backward");
  require_tensor(op.gate_up, 2 * shape_.tokens() * shape_.inner);
  require_tensor(op.dout, shape_.tokens() * shape_.inner);
  require_tensor(op.dgate_up, 2 * shape_.tokens() * shape_.inner);
  check(gated_activation_backward(shape_, op, native(stream)), "a gated activation's gradient");
}

void CudaOps::run(const Add& op, Stream& stream) {
  const Range range("add");
  for (const void* tensor : {op.a, op.b, static_cast<const void*>(op.sum)}) {
    require_tensor(tensor, shape_.tokens() * shape_.width);
  }
  check(add(shape_, op, native(stream)), "a sum");
}

}  // namespace spillway::models
