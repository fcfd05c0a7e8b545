// The way back through a layer, for one slice of a micro-batch.
#include <utility>

#include "tools/models/trainer.h"

namespace spillway::models {

void Trainer::norm_backward(const NormBackward& op) const {
  if (!model_.rms) {
    ops_->run(LayerNormBackward{op.x, op.weight, op.dout, op.statistics, op.residual, op.dx, op.dweight, op.dbias,
                                op.gradient, op.accumulate, op.count},
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
                            .offset = model_.norm_offset,
                            .count = op.count},
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
                 .accumulate = !visit.slice.begins,
                 .count = visit.slice.count});
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
                            .accumulate = !visit.slice.begins,
                            .groups = is_key ? shape_.kv_heads() : shape_.heads,
                            .columns = shape_.head_width(),
                            .offset = model_.norm_offset,
                            .count = visit.slice.count},
            *stream_);
  push_layer(visit, weight);
}

// `d` is the gradient with respect to the layer's output, then middle, then its input x.
void Trainer::layer_backward(const LayerVisit& visit, const std::byte* x, std::byte* d) const {
  const Workspace& w = *work_;
  std::byte* const residual = w.layer.residual;
  const Inside& inside = visit.inside;
  const TrainedLayer& layer = visit.layer;
  const auto width = shape_.width, inner = shape_.inner, query = static_cast<std::uint32_t>(shape_.query_width());
  const std::uint32_t count = visit.slice.count;

  const std::byte* added = d;  // the gradient of what the MLP added
  if (layer.mlp_after) {
    norm_gradient(visit, *layer.mlp_after, inside.fed, inside.fed_statistics, d, nullptr, residual);
    added = residual;
  }
  product_gradient(visit, layer.mlp_out,
                   {.in = inner,
                    .x = inside.activation,
                    .dy = added,
                    .dx = w.dinner,
                    .gelu_before = model_.gate ? nullptr : inside.mlp});
  if (model_.gate) {
    ops_->run(GatedActivationBackward{inside.mlp, w.dinner, inside.mlp, *model_.gate, count}, *stream_);
    products_gradient(visit, layer.mlp, width, inside.norm2, inside.mlp, 2 * std::size_t{inner}, w.dnorm);
  } else {
    products_gradient(visit, layer.mlp, width, inside.norm2, w.dinner, 0, w.dnorm);
  }
  norm_gradient(visit, layer.mlp_norm, inside.middle, inside.statistics2, w.dnorm, d, d);

  added = d;
  if (layer.attention_after) {
    norm_gradient(visit, *layer.attention_after, inside.attended, inside.attended_statistics, d, nullptr, residual);
    added = residual;
  }
  product_gradient(visit, layer.attention_out, {.in = query, .x = inside.attention, .dy = added, .dx = w.dattention});
  ops_->run(AttentionBackward{.qkv = inside.qkv,
                              .out = inside.attention,
                              .log_sums = inside.log_sums,
                              .dout = w.dattention,
                              .dqkv = w.dqkv,
                              .rules = layer_forward_.rules(visit),
                              .part = layer_forward_.part(visit.tokens),
                              .dkv = w.dkeys,
                              .count = count},
            *stream_);
  layer_forward_.rotate(visit, w.dqkv, true);
  if (layer.query_norm) {
    head_norm_gradient(visit, *layer.query_norm, 0, false);
    head_norm_gradient(visit, *layer.key_norm, shape_.query_width(), true);
  }
  products_gradient(visit, layer.qkv, width, inside.norm1, w.dqkv, shape_.qkv_width(), w.dnorm);
  norm_gradient(visit, layer.attention_norm, x, inside.statistics1, w.dnorm, d, d);
}

}  // namespace spillway::models
