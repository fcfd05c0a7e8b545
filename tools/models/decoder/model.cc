#include "tools/models/decoder/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tools/models/config_json.h"
#include "tools/models/linear.h"

namespace spillway::models {
namespace {

Block decoder_layer(const ModelShape& shape, std::uint32_t layer) {
  const std::uint64_t width = shape.width, inner = shape.inner;
  const std::string name = fmt::format("model.layers.{}.", layer);
  Block block{.name = fmt::format("layer {}", layer), .parameters = {}};
  block.parameters.push_back(tensor(name + "input_layernorm.weight", {width}));
  add_linear(block, name + "self_attn.q_proj", width, shape.query_width(), shape.query_bias);
  add_linear(block, name + "self_attn.k_proj", width, shape.key_width(), shape.query_bias);
  add_linear(block, name + "self_attn.v_proj", width, shape.key_width(), shape.query_bias);
  add_linear(block, name + "self_attn.o_proj", shape.query_width(), width, shape.output_bias);
  if (shape.query_norm) {
    for (const char* norm : {"q_norm", "k_norm"})
      block.parameters.push_back(tensor(fmt::format("{}self_attn.{}.weight", name, norm), {shape.head_width}));
  }
  block.parameters.push_back(tensor(name + "post_attention_layernorm.weight", {width}));
  add_linear(block, name + "mlp.gate_proj", width, inner, shape.mlp_bias);
  add_linear(block, name + "mlp.up_proj", width, inner, shape.mlp_bias);
  add_linear(block, name + "mlp.down_proj", inner, width, shape.mlp_bias);
  return block;
}

}  // namespace

bool is_decoder(const std::string& family) {
  return family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3";
}

ModelShape decoder_shape(const ConfigJson& json, const std::string& family) {
  const bool qwen = family.starts_with("qwen");
  ModelShape shape{.family = family};
  shape.layers = json.size("num_hidden_layers", {}, kMostLayers);
  shape.width = json.size("hidden_size");
  shape.inner = json.size("intermediate_size");
  shape.vocabulary = json.size("vocab_size");
  shape.positions = json.size("max_position_embeddings", 0);
  shape.heads = json.size("num_attention_heads");
  shape.kv_heads = json.size("num_key_value_heads", shape.heads);
  if (shape.heads % shape.kv_heads != 0) {
    json.refuse(fmt::format("\"num_attention_heads\" {} is not a multiple of \"num_key_value_heads\" {}", shape.heads,
                            shape.kv_heads));
  }
  if (!json.has("head_dim") && shape.width % shape.heads != 0) {
    json.refuse(
        fmt::format("\"hidden_size\" {} is not a multiple of \"num_attention_heads\" {}", shape.width, shape.heads),
        "say \"head_dim\", or repair the file");
  }
  // Qwen3's own default; the others divide.
  shape.head_width = json.size("head_dim", family == "qwen3" ? 128 : std::max(1u, shape.width / shape.heads));
  check_heads(json, shape);
  const bool slides = family == "mistral" || (qwen && json.flag("use_sliding_window", false));
  if (slides && json.has("sliding_window")) shape.window = json.size("sliding_window");
  shape.tied = json.flag("tie_word_embeddings", false);
  const bool biased = family != "qwen2" && json.flag("attention_bias", false);
  shape.query_bias = biased || family == "qwen2";
  shape.output_bias = biased;
  shape.mlp_bias = family == "llama" && json.flag("mlp_bias", false);
  shape.query_norm = family == "qwen3";
  return shape;
}

ModelDescription decoder_parameters(const ModelShape& shape) {
  const std::uint64_t width = shape.width, vocabulary = shape.vocabulary;
  ModelDescription model;
  model.blocks.push_back(
      {.name = "embedding", .parameters = {tensor("model.embed_tokens.weight", {vocabulary, width})}});
  for (std::uint32_t l = 0; l < shape.layers; ++l) model.blocks.push_back(decoder_layer(shape, l));
  if (!shape.tied) model.blocks.push_back({.name = "head", .parameters = {}});
  Block& last = shape.tied ? model.blocks[0] : model.blocks.back();
  last.parameters.push_back(tensor("model.norm.weight", {width}));
  if (!shape.tied) last.parameters.push_back(tensor("lm_head.weight", {vocabulary, width}));
  return model;
}

}  // namespace spillway::models
