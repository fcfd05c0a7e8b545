#include "tools/models/t5/model.h"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "tools/models/config_json.h"
#include "tools/models/linear.h"

namespace spillway::models {
namespace {

// A layer of T5's encoder, or with attention to the encoder's output of its decoder.
Block t5_layer(const ModelShape& shape, const char* stack, std::uint32_t layer) {
  const bool decodes = stack == std::string_view("decoder");
  const std::uint64_t width = shape.width, inner = shape.inner, query = shape.query_width();
  const std::string name = fmt::format("{}.block.{}.layer.", stack, layer);
  Block block{.name = fmt::format("{} layer {}", stack, layer), .parameters = {}};
  int part = 0;
  const auto add_norm = [&] {
    block.parameters.push_back(tensor(fmt::format("{}{}.layer_norm.weight", name, part++), {width}));
  };
  for (const char* attention : {"SelfAttention", "EncDecAttention"}) {
    if (part > 0 && !decodes) break;
    const std::string at = fmt::format("{}{}.{}.", name, part, attention);
    for (const char* product : {"q", "k", "v"}) add_linear(block, at + product, width, query, false);
    add_linear(block, at + "o", query, width, false);
    // The first layer's positions are those of every layer of the stack.
    if (layer == 0 && part == 0)
      block.parameters.push_back(tensor(at + "relative_attention_bias.weight", {shape.buckets, shape.heads}));
    add_norm();
  }
  const std::string mlp = fmt::format("{}{}.DenseReluDense.", name, part);
  if (shape.gated) {
    add_linear(block, mlp + "wi_0", width, inner, false);
    add_linear(block, mlp + "wi_1", width, inner, false);
  } else {
    add_linear(block, mlp + "wi", width, inner, false);
  }
  add_linear(block, mlp + "wo", inner, width, false);
  add_norm();
  return block;
}

}  // namespace

ModelShape t5_shape(const ConfigJson& json) {
  ModelShape shape{.family = "t5"};
  shape.layers = json.size("num_layers", 6, kMostLayers);
  shape.decoder_layers = json.size("num_decoder_layers", shape.layers, kMostLayers);
  shape.width = json.size("d_model", 512);
  shape.inner = json.size("d_ff", 2048);
  shape.vocabulary = json.size("vocab_size", 32128);
  shape.heads = shape.kv_heads = json.size("num_heads", 8);
  shape.head_width = json.size("d_kv", 64);
  check_heads(json, shape.heads, shape.head_width);
  shape.buckets = json.size("relative_attention_num_buckets", 32);
  shape.gated = json.text("feed_forward_proj", "relu").starts_with("gated-");
  shape.tied = json.flag("tie_word_embeddings", true);
  return shape;
}

ModelDescription t5_parameters(const ModelShape& shape) {
  const std::uint64_t width = shape.width, vocabulary = shape.vocabulary;
  ModelDescription model;
  model.blocks.push_back({.name = "embedding", .parameters = {tensor("shared.weight", {vocabulary, width})}});
  for (std::uint32_t l = 0; l < shape.layers; ++l) model.blocks.push_back(t5_layer(shape, "encoder", l));
  model.blocks.back().parameters.push_back(tensor("encoder.final_layer_norm.weight", {width}));
  for (std::uint32_t l = 0; l < shape.decoder_layers; ++l) model.blocks.push_back(t5_layer(shape, "decoder", l));
  if (!shape.tied) model.blocks.push_back({.name = "head", .parameters = {}});
  Block& last = shape.tied ? model.blocks[0] : model.blocks.back();
  last.parameters.push_back(tensor("decoder.final_layer_norm.weight", {width}));
  if (!shape.tied) last.parameters.push_back(tensor("lm_head.weight", {vocabulary, width}));
  return model;
}

}  // namespace spillway::models
