// What a layer computes, forward and backward, for one micro-batch.
#include <utility>

#include "tools/models/trainer.h"

namespace spillway::models {

Trainer::Inside::Inside(Carver& carver, const Trainer& trainer) {
  const Shape& shape = trainer.shape_;
  const TrainedModel& model = trainer.model_;
  const TrainedLayer& layer = model.layers[0];  // all have the same tensors
  const std::size_t m = shape.tokens(), e = size_of(shape.type), width = shape.width;
  const auto tensor = [&](bool there, std::size_t columns) {
    return there ? carver.take<std::byte>(m * columns * e) : nullptr;
  };
  const auto statistics = [&](bool there, std::size_t values) {
    return there ? carver.take<float>(m * values) : nullptr;
  };
  norm1 = tensor(true, width);
  projected = tensor(layer.query_norm.has_value(), shape.qkv_width());
  qkv = tensor(true, shape.qkv_width());
  attention = tensor(true, shape.query_width());
  attended = tensor(layer.attention_after.has_value(), width);
  middle = tensor(true, width);
  norm2 = tensor(true, width);
  mlp = tensor(true, (model.gate ? 2u : 1u) * std::size_t{shape.inner});
  activation = tensor(true, shape.inner);
  fed = tensor(layer.mlp_after.has_value(), width);
  statistics1 = statistics(true, model.rms ? 1 : 2);
  statistics2 = statistics(true, model.rms ? 1 : 2);
  query_statistics = statistics(layer.query_norm.has_value(), shape.heads);
  key_statistics = statistics(layer.key_norm.has_value(), shape.kv_heads());
  attended_statistics = statistics(layer.attention_after.has_value(), 1);
  fed_statistics = statistics(layer.mlp_after.has_value(), 1);
  log_sums = carver.take<float>(trainer.ops_->attention_log_sums());
}

void Trainer::norm(const NormTensors& norm, const Lease& lease, const void* x, void* out, float* statistics) const {
  if (!model_.rms) {
    ops_->run(LayerNorm{x, lease.weight(norm.weight), lease.weight(*norm.bias), out, statistics}, *stream_);
    return;
  }
  ops_->run(RmsNorm{.x = x,
                    .x_stride = shape_.width,
                    .weight = lease.weight(norm.weight),
                    .out = out,
                    .out_stride = shape_.width,
                    .statistics = statistics,
                    .groups = 1,
                    .columns = shape_.width,
                    .offset = model_.norm_offset},
            *stream_);
}

void Trainer::products(std::span<const ProductTensors> products, const Lease& lease, const void* x, std::byte* y,
                       std::size_t y_stride) const {
  for (const ProductTensors& product : products) {
    ops_->run(Linear{.in = shape_.width,
                     .out = product.out,
                     .x = x,
                     .weight = lease.weight(product.weight),
                     .bias = product.bias ? lease.weight(*product.bias) : nullptr,
                     .residual = nullptr,
                     .y = y,
                     .layout = model_.layout,
                     .y_stride = y_stride},
              *stream_);
    y += product.out * size_of(shape_.type);
  }
}

AttentionRules Trainer::rules(const TrainedLayer& layer, std::uint32_t micro_batch) const {
  return {.window = layer.window,
          .scale = model_.attention_scale,
          .soft_cap = model_.attention_soft_cap,
          .starts = options_.documents ? work_->starts + micro_batch * shape_.tokens() : nullptr};
}

void Trainer::rotate(const TrainedLayer& layer, std::byte* qkv, std::uint32_t micro_batch, bool backward) const {
  if (!layer.rotation) return;
  ops_->run(Rotary{.x = qkv,
                   .stride = shape_.qkv_width(),
                   .heads = shape_.heads + shape_.kv_heads(),
                   .head_width = shape_.head_width(),
                   .rotated = model_.rotations[*layer.rotation].rotated,
                   .table = work_->rotations[*layer.rotation],
                   .positions = options_.documents ? work_->positions + micro_batch * shape_.tokens() : nullptr,
                   .backward = backward},
            *stream_);
}

// The heads of the queries, or of the keys, each by itself.
void Trainer::head_norm(ParameterIndex weight, const Lease& lease, const Inside& w, std::size_t column,
                        bool is_key) const {
  const std::size_t offset = column * size_of(shape_.type);
  ops_->run(RmsNorm{.x = w.projected + offset,
                    .x_stride = shape_.qkv_width(),
                    .weight = lease.weight(weight),
                    .out = w.qkv + offset,
                    .out_stride = shape_.qkv_width(),
                    .statistics = is_key ? w.key_statistics : w.query_statistics,
                    .groups = is_key ? shape_.kv_heads() : shape_.heads,
                    .columns = shape_.head_width(),
                    .offset = model_.norm_offset},
            *stream_);
}

// middle = x + projection of the attention over norm(x)
void Trainer::layer_attention(const TrainedLayer& layer, const Lease& lease, const std::byte* x, const Inside& w,
                              std::uint32_t micro_batch) const {
  const std::size_t row = shape_.qkv_width();
  norm(layer.attention_norm, lease, x, w.norm1, w.statistics1);
  if (layer.query_norm) {
    // Values need no norm.
    const std::span<const ProductTensors> all(layer.qkv);
    const std::size_t value = shape_.query_width() + std::size_t{shape_.kv_heads()} * shape_.head_width();
    products(all.first(all.size() - 1), lease, w.norm1, w.projected, row);
    products(all.last(1), lease, w.norm1, w.qkv + value * size_of(shape_.type), row);
    head_norm(*layer.query_norm, lease, w, 0, false);
    head_norm(*layer.key_norm, lease, w, shape_.query_width(), true);
  } else {
    products(layer.qkv, lease, w.norm1, w.qkv, row);
  }
  rotate(layer, w.qkv, micro_batch, false);
  ops_->run(Attention{w.qkv, w.attention, w.log_sums, rules(layer, micro_batch)}, *stream_);
  const ProductTensors& out = layer.attention_out;
  ops_->run(Linear{.in = static_cast<std::uint32_t>(shape_.query_width()),
                   .out = shape_.width,
                   .x = w.attention,
                   .weight = lease.weight(out.weight),
                   .bias = out.bias ? lease.weight(*out.bias) : nullptr,
                   .residual = layer.attention_after ? nullptr : x,
                   .y = layer.attention_after ? w.attended : w.middle,
                   .layout = model_.layout},
            *stream_);
  if (!layer.attention_after) return;
  norm(*layer.attention_after, lease, w.attended, work_->residual, w.attended_statistics);
  ops_->run(Add{x, work_->residual, w.middle}, *stream_);
}

// activation = what the activation makes of mlp, mlp = first product over norm(middle)
void Trainer::layer_mlp_inner(const TrainedLayer& layer, const Lease& lease, const Inside& w) const {
  norm(layer.mlp_norm, lease, w.middle, w.norm2, w.statistics2);
  if (!model_.gate) {
    const ProductTensors& product = layer.mlp[0];
    ops_->run(LinearGelu{shape_.width, shape_.inner, w.norm2, lease.weight(product.weight), lease.weight(*product.bias),
                         w.mlp, w.activation},
              *stream_);
    return;
  }
  products(layer.mlp, lease, w.norm2, w.mlp, 2 * std::size_t{shape_.inner});
  ops_->run(GatedActivation{w.mlp, w.activation, *model_.gate}, *stream_);
}

// y = last product + residual
void Trainer::mlp_product(const TrainedLayer& layer, const Lease& lease, const Inside& w, const std::byte* residual,
                          std::byte* y) const {
  const ProductTensors& product = layer.mlp_out;
  ops_->run(Linear{.in = shape_.inner,
                   .out = shape_.width,
                   .x = w.activation,
                   .weight = lease.weight(product.weight),
                   .bias = product.bias ? lease.weight(*product.bias) : nullptr,
                   .residual = residual,
                   .y = y,
                   .layout = model_.layout},
            *stream_);
}

// What is added to middle, where that is normalized before.
void Trainer::layer_mlp_fed(const TrainedLayer& layer, const Lease& lease, const Inside& w) const {
  mlp_product(layer, lease, w, nullptr, w.fed);
  norm(*layer.mlp_after, lease, w.fed, work_->residual, w.fed_statistics);
}

// out = middle + what the MLP gives
void Trainer::layer_mlp_out(const TrainedLayer& layer, const Lease& lease, const Inside& w, std::byte* out) const {
  if (!layer.mlp_after) {
    mlp_product(layer, lease, w, w.middle, out);
    return;
  }
  layer_mlp_fed(layer, lease, w);
  ops_->run(Add{w.middle, work_->residual, out}, *stream_);
}

// Pushed when it has seen all micro-batches of a part.
void Trainer::push_layer(const LayerVisit& visit, ParameterIndex parameter) const {
  if (!ends_part(visit.micro_batch)) return;
  push(layer_block(visit.index), parameter, gradient_of(parameter), gradient_type_, visit.micro_batch);
}

// Weight and bias gradient of a product.
void Trainer::product_gradient(const LayerVisit& visit, const ProductTensors& product, std::uint32_t in, const void* x,
                               const std::byte* dy, std::size_t dy_stride) const {
  ops_->run(LinearBackwardWeight{.in = in,
                                 .out = product.out,
                                 .x = x,
                                 .dy = dy,
                                 .dweight = gradient_of(product.weight),
                                 .dbias = product.bias ? gradient_of(*product.bias) : nullptr,
                                 .gradient = gradient_type_,
                                 .accumulate = !begins_part(visit.micro_batch),
                                 .layout = model_.layout,
                                 .dy_stride = dy_stride},
            *stream_);
  push_layer(visit, product.weight);
  if (product.bias) push_layer(visit, *product.bias);
}

void Trainer::products_gradient(const LayerVisit& visit, std::span<const ProductTensors> products, std::uint32_t in,
                                const void* x, const std::byte* dy, std::size_t dy_stride, std::byte* dx) const {
  const void* sum = nullptr;
  for (const ProductTensors& product : products) {
    product_gradient(visit, product, in, x, dy, dy_stride);
    ops_->run(LinearBackwardInput{.in = in,
                                  .out = product.out,
                                  .dy = dy,
                                  .weight = visit.lease.weight(product.weight),
                                  .dx = dx,
                                  .layout = model_.layout,
                                  .dy_stride = dy_stride,
                                  .residual = sum},
              *stream_);
    sum = dx;
    dy += product.out * size_of(shape_.type);
  }
}

void Trainer::norm_backward(const NormBackward& op) const {
  if (!model_.rms) {
    ops_->run(LayerNormBackward{op.x, op.weight, op.dout, op.statistics, op.residual, op.dx, op.dweight, op.dbias,
                                op.gradient, op.accumulate},
              *stream_);
    return;
  }
  ops_->run(RmsNormBackward{.x = op.x,
                            .x_stride = shape_.width,
                            .weight = op.weight,
                            .dout = op.dout,
                            .dout_stride = shape_.width,
                            .statistics = op.statistics,
                            .residual = op.residual,
                            .dx = op.dx,
                            .dx_stride = shape_.width,
                            .dweight = op.dweight,
                            .gradient = op.gradient,
                            .accumulate = op.accumulate,
                            .groups = 1,
                            .columns = shape_.width,
                            .offset = model_.norm_offset},
            *stream_);
}

void Trainer::norm_gradient(const LayerVisit& visit, const NormTensors& norm, const void* x, const float* statistics,
                            const std::byte* dout, const std::byte* residual, std::byte* dx) const {
  norm_backward({.weight = visit.lease.weight(norm.weight),
                 .x = x,
                 .dout = dout,
                 .statistics = statistics,
                 .residual = residual,
                 .dx = dx,
                 .dweight = gradient_of(norm.weight),
                 .dbias = norm.bias ? gradient_of(*norm.bias) : nullptr,
                 .gradient = gradient_type_,
                 .accumulate = !begins_part(visit.micro_batch)});
  push_layer(visit, norm.weight);
  if (norm.bias) push_layer(visit, *norm.bias);
}

void Trainer::head_norm_gradient(const LayerVisit& visit, ParameterIndex weight, std::size_t column,
                                 bool is_key) const {
  const Inside& w = visit.inside;
  const std::size_t offset = column * size_of(shape_.type);
  std::byte* const d = work_->dqkv + offset;
  ops_->run(RmsNormBackward{.x = w.projected + offset,
                            .x_stride = shape_.qkv_width(),
                            .weight = visit.lease.weight(weight),
                            .dout = d,
                            .dout_stride = shape_.qkv_width(),
                            .statistics = is_key ? w.key_statistics : w.query_statistics,
                            .residual = nullptr,
                            .dx = d,
                            .dx_stride = shape_.qkv_width(),
                            .dweight = gradient_of(weight),
                            .gradient = gradient_type_,
                            .accumulate = !begins_part(visit.micro_batch),
                            .groups = is_key ? shape_.kv_heads() : shape_.heads,
                            .columns = shape_.head_width(),
                            .offset = model_.norm_offset},
            *stream_);
  push_layer(visit, weight);
}

// `d` is the gradient with respect to the layer's output, then middle, then its input x.
void Trainer::layer_backward(const LayerVisit& visit, const std::byte* x, std::byte* d) const {
  const Workspace& w = *work_;
  const Inside& inside = visit.inside;
  const TrainedLayer& layer = visit.layer;
  const auto width = shape_.width, inner = shape_.inner, query = static_cast<std::uint32_t>(shape_.query_width());

  const std::byte* added = d;  // the gradient of what the MLP added
  if (layer.mlp_after) {
    norm_gradient(visit, *layer.mlp_after, inside.fed, inside.fed_statistics, d, nullptr, w.residual);
    added = w.residual;
  }
  product_gradient(visit, layer.mlp_out, inner, inside.activation, added, 0);
  ops_->run(LinearBackwardInput{.in = inner,
                                .out = width,
                                .dy = added,
                                .weight = visit.lease.weight(layer.mlp_out.weight),
                                .dx = w.dinner,
                                .gelu_before = model_.gate ? nullptr : inside.mlp,
                                .layout = model_.layout},
            *stream_);
  if (model_.gate) {
    ops_->run(GatedActivationBackward{inside.mlp, w.dinner, inside.mlp, *model_.gate}, *stream_);
    products_gradient(visit, layer.mlp, width, inside.norm2, inside.mlp, 2 * std::size_t{inner}, w.dnorm);
  } else {
    products_gradient(visit, layer.mlp, width, inside.norm2, w.dinner, 0, w.dnorm);
  }
  norm_gradient(visit, layer.mlp_norm, inside.middle, inside.statistics2, w.dnorm, d, d);

  added = d;
  if (layer.attention_after) {
    norm_gradient(visit, *layer.attention_after, inside.attended, inside.attended_statistics, d, nullptr, w.residual);
    added = w.residual;
  }
  product_gradient(visit, layer.attention_out, query, inside.attention, added, 0);
  ops_->run(LinearBackwardInput{.in = query,
                                .out = width,
                                .dy = added,
                                .weight = visit.lease.weight(layer.attention_out.weight),
                                .dx = w.dattention,
                                .layout = model_.layout},
            *stream_);
  ops_->run(AttentionBackward{inside.qkv, inside.attention, inside.log_sums, w.dattention, w.dqkv,
                              rules(layer, visit.micro_batch)},
            *stream_);
  rotate(layer, w.dqkv, visit.micro_batch, true);
  if (layer.query_norm) {
    head_norm_gradient(visit, *layer.query_norm, 0, false);
    head_norm_gradient(visit, *layer.key_norm, shape_.query_width(), true);
  }
  products_gradient(visit, layer.qkv, width, inside.norm1, w.dqkv, shape_.qkv_width(), w.dnorm);
  norm_gradient(visit, layer.attention_norm, x, inside.statistics1, w.dnorm, d, d);
}

}  // namespace spillway::models
