// Products of a layer with its weights, with what a low-rank adapter adds to one:
//
//   y = x · weight + bias + residual + h · upᵀ      h = s · x · downᵀ
//
// Of 16 bits h and the sum y are rounded once each.
#include "tools/models/layer_forward.h"

#include <algorithm>
#include <utility>

namespace spillway::models {

LayerForward::Memory LayerForward::take_memory(Carver& carver) const {
  const auto norms_after = [](const TrainedLayer& layer) { return layer.attention_after || layer.mlp_after; };
  const std::size_t tokens = shape_.slice_tokens();
  Memory memory;
  for (const Rotation& rotation : model_.rotations)
    memory.rotations.push_back(carver.take<float>(rotation.table.size()));
  if (std::ranges::any_of(model_.layers, norms_after))
    memory.residual = carver.take<std::byte>(bytes_of(tokens * shape_.width));
  if (model_.adapters) memory.adapted = carver.take<std::byte>(bytes_of(tokens * model_.adapters->rank));
  return memory;
}

LayerForward::Inside LayerForward::take_inside(Carver& carver) const {
  const TrainedLayer& layer = model_.layers[0];  // all have the same tensors
  const std::size_t m = shape_.slice_tokens(), width = shape_.width;
  const auto tensor = [&](bool there, std::size_t columns) {
    return there ? carver.take<std::byte>(bytes_of(m * columns)) : nullptr;
  };
  const auto statistics = [&](bool there, std::size_t values) {
    return there ? carver.take<float>(m * values) : nullptr;
  };
  return {.norm1 = tensor(true, width),
          .projected = tensor(layer.query_norm.has_value(), shape_.qkv_width()),
          .qkv = tensor(true, shape_.qkv_width()),
          .attention = tensor(true, shape_.query_width()),
          .attended = tensor(layer.attention_after.has_value(), width),
          .middle = tensor(true, width),
          .norm2 = tensor(true, width),
          .mlp = tensor(true, (model_.gate ? 2u : 1u) * std::size_t{shape_.inner}),
          .activation = tensor(true, shape_.inner),
          .fed = tensor(layer.mlp_after.has_value(), width),
          .statistics1 = statistics(true, model_.rms ? 1 : 2),
          .statistics2 = statistics(true, model_.rms ? 1 : 2),
          .query_statistics = statistics(layer.query_norm.has_value(), shape_.heads),
          .key_statistics = statistics(layer.key_norm.has_value(), shape_.kv_heads()),
          .attended_statistics = statistics(layer.attention_after.has_value(), 1),
          .fed_statistics = statistics(layer.mlp_after.has_value(), 1),
          .log_sums = carver.take<float>(ops_.attention_log_sums())};
}

LayerForward::Inside LayerForward::take_passing(Carver& carver, const Memory& memory) const {
  const std::size_t m = shape_.slice_tokens();
  const auto tensor = [&](std::size_t columns) { return carver.take<std::byte>(bytes_of(m * columns)); };
  Inside inside{};
  inside.norm1 = inside.norm2 = tensor(shape_.width);
  inside.projected = inside.qkv = tensor(shape_.qkv_width());
  inside.attention = tensor(shape_.query_width());
  inside.attended = inside.fed = memory.residual;
  inside.mlp = tensor((model_.gate ? 2u : 1u) * std::size_t{shape_.inner});
  inside.activation = tensor(shape_.inner);
  inside.statistics1 = inside.statistics2 = inside.query_statistics = inside.key_statistics =
      inside.attended_statistics = inside.fed_statistics = carver.take<float>(m * std::max(2u, shape_.heads));
  inside.log_sums = carver.take<float>(ops_.attention_log_sums());
  return inside;
}

void LayerForward::attach(Memory memory, std::span<float> rotations, Stream& stream) {
  memory_ = std::move(memory);
  stream_ = &stream;
  for (std::size_t r = 0; r < model_.rotations.size(); ++r) {
    const std::vector<float>& table = model_.rotations[r].table;
    std::ranges::copy(table, rotations.begin());
    ops_.upload(rotations.data(), memory_.rotations[r], table.size() * sizeof(float), stream);
    rotations = rotations.subspan(table.size());
  }
}

void LayerForward::norm(const NormTensors& norm, const Lease& lease, const void* x, void* out, float* statistics,
                        std::uint32_t count) const {
  if (!model_.rms) {
    ops_.run(LayerNorm{x, lease.weight(norm.weight), lease.weight(*norm.bias), out, statistics, count}, *stream_);
    return;
  }
  ops_.run(RmsNorm{.x = x,
                   .x_stride = shape_.width,
                   .weight = lease.weight(norm.weight),
                   .out = out,
                   .out_stride = shape_.width,
                   .statistics = statistics,
                   .groups = 1,
                   .columns = shape_.width,
                   .offset = model_.norm_offset,
                   .count = count},
           *stream_);
}

void LayerForward::scale(std::byte* rows, std::uint32_t count) const {
  const TrainedAdapters& adapters = *model_.adapters;
  ops_.run(Scale{.x = rows, .out = rows, .factor = adapters.scale, .columns = adapters.rank, .count = count}, *stream_);
}

void LayerForward::adapt(const Visit& visit, const AdapterTensors& adapter, std::uint32_t in, const void* x) const {
  ops_.run(Linear{.in = in,
                  .out = model_.adapters->rank,
                  .x = x,
                  .weight = visit.adapters->weight(adapter.down),
                  .bias = nullptr,
                  .residual = nullptr,
                  .y = memory_.adapted,
                  .layout = Layout::kOutIn,
                  .count = visit.tokens.count},
           *stream_);
  scale(memory_.adapted, visit.tokens.count);
}

void LayerForward::product(const Visit& visit, const ProductTensors& product, const Product& op) const {
  ops_.run(Linear{.in = op.in,
                  .out = product.out,
                  .x = op.x,
                  .weight = visit.lease.weight(product.weight),
                  .bias = product.bias ? visit.lease.weight(*product.bias) : nullptr,
                  .residual = op.residual,
                  .y = op.y,
                  .layout = model_.layout,
                  .y_stride = op.y_stride,
                  .count = visit.tokens.count},
           *stream_);
  if (!product.adapter) return;
  adapt(visit, *product.adapter, op.in, op.x);
  ops_.run(Linear{.in = model_.adapters->rank,
                  .out = product.out,
                  .x = memory_.adapted,
                  .weight = visit.adapters->weight(product.adapter->up),
                  .bias = nullptr,
                  .residual = op.y,
                  .y = op.y,
                  .layout = Layout::kOutIn,
                  .y_stride = op.y_stride,
                  .count = visit.tokens.count},
           *stream_);
}

void LayerForward::products(const Visit& visit, std::span<const ProductTensors> products, const void* x, std::byte* y,
                            std::size_t y_stride) const {
  for (const ProductTensors& each : products) {
    product(visit, each, {.in = shape_.width, .x = x, .y = y, .y_stride = y_stride});
    y += bytes_of(each.out);
  }
}

// The heads of the queries, or of the keys, each by itself.
void LayerForward::head_norm(const Visit& visit, ParameterIndex weight, std::size_t column, bool is_key) const {
  const Inside& w = visit.inside;
  ops_.run(RmsNorm{.x = w.projected + bytes_of(column),
                   .x_stride = shape_.qkv_width(),
                   .weight = visit.lease.weight(weight),
                   .out = w.qkv + bytes_of(column),
                   .out_stride = shape_.qkv_width(),
                   .statistics = is_key ? w.key_statistics : w.query_statistics,
                   .groups = is_key ? shape_.kv_heads() : shape_.heads,
                   .columns = shape_.head_width(),
                   .offset = model_.norm_offset,
                   .count = visit.tokens.count},
           *stream_);
}

void LayerForward::rotate(const Visit& visit, std::byte* qkv, bool backward) const {
  if (!visit.layer.rotation) return;
  ops_.run(Rotary{.x = qkv,
                  .stride = shape_.qkv_width(),
                  .heads = shape_.heads + shape_.kv_heads(),
                  .head_width = shape_.head_width(),
                  .rotated = model_.rotations[*visit.layer.rotation].rotated,
                  .table = memory_.rotations[*visit.layer.rotation],
                  .positions = visit.tokens.positions,
                  .backward = backward,
                  .count = visit.tokens.count},
           *stream_);
}

AttentionRules LayerForward::rules(const Visit& visit) const {
  return {.window = visit.layer.window,
          .scale = model_.attention_scale,
          .soft_cap = model_.attention_soft_cap,
          .starts = visit.tokens.starts};
}

AttentionPart LayerForward::part(const Tokens& tokens) const {
  if (tokens.keys == nullptr) return {};
  return {.keys = tokens.keys,
          .values = tokens.keys + bytes_of(key_width()),
          .stride = 2 * key_width(),
          .first = tokens.first,
          .count = tokens.count};
}

// qkv = queries, keys and values of norm(x). Keys and values of a row in parts are kept for the parts after.
void LayerForward::queries_and_keys(const Visit& visit, const std::byte* x) const {
  const auto& [lease, adapters, layer, w, tokens] = visit;
  const std::size_t row = shape_.qkv_width(), query = shape_.query_width(), both = 2 * key_width();
  norm(layer.attention_norm, lease, x, w.norm1, w.statistics1, tokens.count);
  if (layer.query_norm) {
    // Values need no norm.
    const std::span<const ProductTensors> all(layer.qkv);
    products(visit, all.first(all.size() - 1), w.norm1, w.projected, row);
    products(visit, all.last(1), w.norm1, w.qkv + bytes_of(query + key_width()), row);
    head_norm(visit, *layer.query_norm, 0, false);
    head_norm(visit, *layer.key_norm, query, true);
  } else {
    products(visit, layer.qkv, w.norm1, w.qkv, row);
  }
  rotate(visit, w.qkv, false);
  if (tokens.keys == nullptr) return;
  ops_.run(CopyRows{.from = w.qkv + bytes_of(query),
                    .from_stride = row,
                    .to = tokens.keys + bytes_of(tokens.first * both),
                    .to_stride = both,
                    .columns = static_cast<std::uint32_t>(both),
                    .count = tokens.count},
           *stream_);
}

// middle = x + projection of the attention over norm(x)
void LayerForward::attention(const Visit& visit, const std::byte* x) const {
  const auto& [lease, adapters, layer, w, tokens] = visit;
  queries_and_keys(visit, x);
  ops_.run(Attention{.qkv = w.qkv,
                     .out = w.attention,
                     .log_sums = w.log_sums,
                     .rules = rules(visit),
                     .part = part(tokens),
                     .count = tokens.count},
           *stream_);
  product(visit, layer.attention_out,
          {.in = static_cast<std::uint32_t>(shape_.query_width()),
           .x = w.attention,
           .residual = layer.attention_after ? nullptr : x,
           .y = layer.attention_after ? w.attended : w.middle});
  if (!layer.attention_after) return;
  norm(*layer.attention_after, lease, w.attended, memory_.residual, w.attended_statistics, tokens.count);
  ops_.run(Add{x, memory_.residual, w.middle, tokens.count}, *stream_);
}

// activation = gelu(mlp), mlp = product of norm2
void LayerForward::gelu(const Visit& visit) const {
  const Inside& w = visit.inside;
  const ProductTensors& first = visit.layer.mlp[0];
  if (first.adapter) {
    product(visit, first, {.in = shape_.width, .x = w.norm2, .y = w.mlp});
    ops_.run(Gelu{.before = w.mlp, .after = w.activation, .columns = first.out, .count = visit.tokens.count}, *stream_);
    return;
  }
  ops_.run(LinearGelu{shape_.width, first.out, w.norm2, visit.lease.weight(first.weight),
                      visit.lease.weight(*first.bias), w.mlp, w.activation, visit.tokens.count},
           *stream_);
}

// activation = what the activation makes of mlp, mlp = first product over norm(middle)
void LayerForward::activation(const Visit& visit) const {
  const auto& [lease, adapters, layer, w, tokens] = visit;
  norm(layer.mlp_norm, lease, w.middle, w.norm2, w.statistics2, tokens.count);
  if (!model_.gate) return gelu(visit);
  products(visit, layer.mlp, w.norm2, w.mlp, 2 * std::size_t{shape_.inner});
  ops_.run(GatedActivation{w.mlp, w.activation, *model_.gate, tokens.count}, *stream_);
}

void LayerForward::inside(const Visit& visit, const std::byte* x) const {
  const auto& [lease, adapters, layer, w, tokens] = visit;
  attention(visit, x);
  activation(visit);
  if (!layer.mlp_after) return;
  product(visit, layer.mlp_out, {.in = shape_.inner, .x = w.activation, .y = w.fed});
  norm(*layer.mlp_after, lease, w.fed, memory_.residual, w.fed_statistics, tokens.count);
}

void LayerForward::run(const Visit& visit, const std::byte* x, std::byte* out) const {
  const auto& [lease, adapters, layer, w, tokens] = visit;
  inside(visit, x);
  if (layer.mlp_after)
    ops_.run(Add{w.middle, memory_.residual, out, tokens.count}, *stream_);
  else
    product(visit, layer.mlp_out, {.in = shape_.inner, .x = w.activation, .residual = w.middle, .y = out});
}

}  // namespace spillway::models
