// The way back through products of a layer, with what a low-rank adapter adds to one (layer_forward.cc):
//
// dup   = dyᵀ · h            h = s · x · downᵀ
// ddown = dhᵀ · x            dh = s · dy · up
// dx    = dy · weightᵀ + dh · down
//
// Of 16 bits h, dh and the sum dx are rounded once each. h is computed again, which costs less than to keep it: of a
// product's arithmetic it is rank / out.
#include "tools/models/trainer.h"

namespace spillway::models {

void Trainer::hold_adapters(Pass pass) {
  if (model_.adapters) adapters_ = engine_->acquire(model_.adapters->block, pass, *stream_);
}

// Pushed when it has seen all slices of a part of the step.
void Trainer::push_layer(const LayerVisit& visit, ParameterIndex parameter) const {
  if (!trains_base() || !visit.slice.ends) return;
  push(layer_block(visit.index), parameter, gradient_of(parameter), gradient_type_, visit.slice.micro_batch);
}

void Trainer::push_adapter(const LayerVisit& visit, ParameterIndex parameter) const {
  if (!visit.slice.ends) return;
  push(model_.adapters->block, parameter, work_->adapter_gradients[parameter], gradient_type_, visit.slice.micro_batch);
}

void Trainer::weight_gradient(const LayerVisit& visit, const ProductTensors& product, const ProductBackward& op) const {
  ops_->run(LinearBackwardWeight{.in = op.in,
                                 .out = product.out,
                                 .x = op.x,
                                 .dy = op.dy,
                                 .dweight = gradient_of(product.weight),
                                 .dbias = product.bias ? gradient_of(*product.bias) : nullptr,
                                 .gradient = gradient_type_,
                                 .accumulate = !visit.slice.begins,
                                 .layout = model_.layout,
                                 .dy_stride = op.dy_stride,
                                 .count = visit.slice.count},
            *stream_);
  push_layer(visit, product.weight);
  if (product.bias) push_layer(visit, *product.bias);
}

// Leaves dh in work_->dadapted.
void Trainer::adapter_gradient(const LayerVisit& visit, const ProductTensors& product,
                               const ProductBackward& op) const {
  const auto& [down, up] = *product.adapter;
  const std::uint32_t rank = model_.adapters->rank;
  const bool accumulate = !visit.slice.begins;
  const std::uint32_t count = visit.slice.count;
  layer_forward_.adapt(visit, *product.adapter, op.in, op.x);
  ops_->run(LinearBackwardWeight{.in = rank,
                                 .out = product.out,
                                 .x = work_->layer.adapted,
                                 .dy = op.dy,
                                 .dweight = work_->adapter_gradients[up],
                                 .dbias = nullptr,
                                 .gradient = gradient_type_,
                                 .accumulate = accumulate,
                                 .layout = Layout::kOutIn,
                                 .dy_stride = op.dy_stride,
                                 .count = count},
            *stream_);
  push_adapter(visit, up);
  ops_->run(LinearBackwardInput{.in = rank,
                                .out = product.out,
                                .dy = op.dy,
                                .weight = visit.adapters->weight(up),
                                .dx = work_->dadapted,
                                .layout = Layout::kOutIn,
                                .dy_stride = op.dy_stride,
                                .count = count},
            *stream_);
  layer_forward_.scale(work_->dadapted, count);
  ops_->run(LinearBackwardWeight{.in = op.in,
                                 .out = rank,
                                 .x = op.x,
                                 .dy = work_->dadapted,
                                 .dweight = work_->adapter_gradients[down],
                                 .dbias = nullptr,
                                 .gradient = gradient_type_,
                                 .accumulate = accumulate,
                                 .layout = Layout::kOutIn,
                                 .count = count},
            *stream_);
  push_adapter(visit, down);
}

void Trainer::product_gradient(const LayerVisit& visit, const ProductTensors& product,
                               const ProductBackward& op) const {
  if (trains_base()) weight_gradient(visit, product, op);
  if (product.adapter) adapter_gradient(visit, product, op);
  // Gelu's derivative is of the whole sum.
  const bool gelu_behind = product.adapter && op.gelu_before != nullptr;
  ops_->run(LinearBackwardInput{.in = op.in,
                                .out = product.out,
                                .dy = op.dy,
                                .weight = visit.lease.weight(product.weight),
                                .dx = op.dx,
                                .gelu_before = gelu_behind ? nullptr : op.gelu_before,
                                .layout = model_.layout,
                                .dy_stride = op.dy_stride,
                                .residual = op.residual,
                                .count = visit.slice.count},
            *stream_);
  if (!product.adapter) return;
  ops_->run(LinearBackwardInput{.in = op.in,
                                .out = model_.adapters->rank,
                                .dy = work_->dadapted,
                                .weight = visit.adapters->weight(product.adapter->down),
                                .dx = op.dx,
                                .layout = Layout::kOutIn,
                                .residual = op.dx,
                                .count = visit.slice.count},
            *stream_);
  if (!gelu_behind) return;
  ops_->run(GeluBackward{.before = op.gelu_before, .dx = op.dx, .columns = op.in, .count = visit.slice.count},
            *stream_);
}

void Trainer::products_gradient(const LayerVisit& visit, std::span<const ProductTensors> products, std::uint32_t in,
                                const void* x, const std::byte* dy, std::size_t dy_stride, std::byte* dx) const {
  const void* sum = nullptr;
  for (const ProductTensors& product : products) {
    product_gradient(visit, product, {.in = in, .x = x, .dy = dy, .dy_stride = dy_stride, .dx = dx, .residual = sum});
    sum = dx;
    dy += product.out * size_of(shape_.type);
  }
}

}  // namespace spillway::models
