#include "tools/models/decoder/model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tools/models/linear.h"

namespace spillway::models {
namespace {

// Adds the tensors of a layer to a block, and notes where each went.
class LayerWriter {
 public:
  LayerWriter(const DecoderConfig& config, std::uint32_t layer)
      : config_(config), name_(fmt::format("model.layers.{}.", layer)) {
    block_.name = fmt::format("layer {}", layer);
    attention();
    mlp();
  }

  Block block_;
  TrainedLayer tensors_;

 private:
  ParameterIndex norm(const char* name, std::uint64_t width) {
    block_.parameters.push_back(tensor(fmt::format("{}{}.weight", name_, name), {width}));
    return static_cast<ParameterIndex>(block_.parameters.size() - 1);
  }
  ProductTensors linear(const char* name, std::uint64_t in, std::uint64_t out, bool bias) {
    ProductTensors result{.weight = static_cast<ParameterIndex>(block_.parameters.size()),
                          .out = static_cast<std::uint32_t>(out)};
    add_linear(block_, name_ + name, in, out, bias);
    if (bias) result.bias = result.weight + 1;
    return result;
  }

  void attention() {
    const std::uint64_t width = config_.width, query = config_.query_width(), key = config_.key_width();
    tensors_.attention_norm = {norm("input_layernorm", width)};
    if (config_.fused) {
      tensors_.qkv = {linear("self_attn.qkv_proj", width, query + 2 * key, config_.qkv_bias)};
    } else {
      tensors_.qkv = {linear("self_attn.q_proj", width, query, config_.qkv_bias),
                      linear("self_attn.k_proj", width, key, config_.qkv_bias),
                      linear("self_attn.v_proj", width, key, config_.qkv_bias)};
    }
    tensors_.attention_out = linear("self_attn.o_proj", query, width, config_.output_bias);
    if (config_.query_norm) {
      tensors_.query_norm = norm("self_attn.q_norm", config_.head_width);
      tensors_.key_norm = norm("self_attn.k_norm", config_.head_width);
    }
    // The name has another meaning in Gemma.
    const NormTensors after = {norm("post_attention_layernorm", width)};
    if (config_.norms_after) {
      tensors_.attention_after = after;
      tensors_.mlp_norm = {norm("pre_feedforward_layernorm", width)};
    } else {
      tensors_.mlp_norm = after;
    }
  }

  void mlp() {
    const std::uint64_t width = config_.width, inner = config_.inner;
    if (config_.fused) {
      tensors_.mlp = {linear("mlp.gate_up_proj", width, 2 * inner, config_.mlp_bias)};
    } else {
      tensors_.mlp = {linear("mlp.gate_proj", width, inner, config_.mlp_bias),
                      linear("mlp.up_proj", width, inner, config_.mlp_bias)};
    }
    tensors_.mlp_out = linear("mlp.down_proj", inner, width, config_.mlp_bias);
    if (config_.norms_after) tensors_.mlp_after = NormTensors{norm("post_feedforward_layernorm", width)};
  }

  const DecoderConfig& config_;
  const std::string name_;
};

std::string rotary_text(const RotaryRules& rules) {
  std::string text =
      fmt::format("type {}, {} columns, theta {}", static_cast<int>(rules.scaling), rules.rotated, rules.theta);
  if (rules.scaling == RotaryScaling::kNone) return text;
  return text + fmt::format(", factor {}, positions {} of {}, attention {}, frequencies {} {}, betas {} {} {}, {} {}",
                            rules.factor, rules.original_positions, rules.positions, rotary_attention_factor(rules),
                            rules.low_freq_factor, rules.high_freq_factor, rules.beta_fast, rules.beta_slow,
                            rules.truncate, fmt::join(rules.short_factor, " "), fmt::join(rules.long_factor, " "));
}

// What the shapes of tensors do not show.
std::vector<std::pair<std::string, std::string>> info_of(const DecoderConfig& config) {
  std::string windows, rotary;
  for (const DecoderConfig::Layer& layer : config.layer_rules)
    windows += fmt::format("{}{}", windows.empty() ? "" : " ", layer.window);
  for (const RotaryRules& rules : config.rotary)
    rotary += fmt::format("{}{}", rotary.empty() ? "" : "; ", rotary_text(rules));
  static constexpr const char* kActivations[] = {"silu", "gelu_pytorch_tanh", "gelu"};
  return {{"num_attention_heads", fmt::format("{}", config.heads)},
          {"rms_norm_eps", fmt::format("{}", config.epsilon)},
          {"hidden_act", kActivations[static_cast<std::size_t>(config.activation)]},
          {"sliding_window", windows},
          {"rope_parameters", rotary},
          {"query_pre_attn_scalar", fmt::format("{}", config.attention_scale)},
          {"attn_logit_softcapping", fmt::format("{}", config.attention_soft_cap)},
          {"final_logit_softcapping", fmt::format("{}", config.head_soft_cap)}};
}

}  // namespace

ModelShape decoder_shape(DecoderConfig config) {
  ModelShape shape{.family = config.family};
  shape.layers = config.layers;
  shape.width = config.width;
  shape.inner = config.inner;
  shape.vocabulary = config.vocabulary;
  shape.positions = config.positions;
  shape.heads = config.heads;
  shape.kv_heads = config.kv_heads;
  shape.head_width = config.head_width;
  // A layer that sees all of a row makes the plan take all of them for such.
  shape.window = config.layer_rules[0].window;
  for (const auto& layer : config.layer_rules) {
    if (layer.window != shape.window) shape.window = 0;
  }
  shape.tied = config.tied;
  shape.decoder = std::move(config);
  return shape;
}

ModelDescription decoder_parameters(const DecoderConfig& config) {
  const std::uint64_t width = config.width, vocabulary = config.vocabulary;
  ModelDescription model;
  model.blocks.push_back(
      {.name = "embedding", .parameters = {tensor("model.embed_tokens.weight", {vocabulary, width})}});
  for (std::uint32_t l = 0; l < config.layers; ++l) model.blocks.push_back(LayerWriter(config, l).block_);
  if (!config.tied) model.blocks.push_back({.name = "head", .parameters = {}});
  Block& last = config.tied ? model.blocks[0] : model.blocks.back();
  last.parameters.push_back(tensor("model.norm.weight", {width}));
  if (!config.tied) last.parameters.push_back(tensor("lm_head.weight", {vocabulary, width}));
  return model;
}

TrainedModel trained_decoder(const DecoderConfig& config, std::uint32_t sequence) {
  TrainedModel model;
  model.description = decoder_parameters(config);
  model.head_block = config.tied ? kEmbeddingBlock : layer_block(config.layers);
  // In decoder_parameters()'s order; token_weight is the embedding's first.
  model.final_norm.weight = config.tied ? 1 : 0;
  model.head_weight = config.tied ? model.token_weight : 1;
  TrainedLayer layer = LayerWriter(config, 0).tensors_;  // the same in all of them
  for (const DecoderConfig::Layer& rules : config.layer_rules) {
    layer.window = rules.window;
    layer.rotation = rules.rotary;
    model.layers.push_back(layer);
  }
  for (const RotaryRules& rules : config.rotary)
    model.rotations.push_back({.rotated = rules.rotated, .table = rotary_table(rules, sequence)});

  auto& visits = model.description.visits;
  visits.push_back({kEmbeddingBlock, Pass::kForward});
  for (std::uint32_t l = 0; l < config.layers; ++l) visits.push_back({layer_block(l), Pass::kForward});
  visits.push_back({model.head_block, Pass::kBackward});
  for (std::uint32_t l = config.layers; l-- > 0;) visits.push_back({layer_block(l), Pass::kBackward});
  visits.push_back({kEmbeddingBlock, Pass::kBackward});
  model.description.attachments.push_back({.name = "config.json", .text = config.text});

  model.width = config.width;
  model.heads = config.heads;
  model.inner = config.inner;
  model.vocabulary = config.vocabulary;
  model.positions = config.positions;
  model.key_heads = config.kv_heads;
  model.head_size = config.head_width;
  model.epsilon = config.epsilon;
  model.layout = Layout::kOutIn;
  model.rms = true;
  model.norm_offset = config.norm_offset;
  model.gate = config.activation;
  model.embedding_scale = config.embedding_scale();
  model.attention_scale = config.attention_scale;
  model.attention_soft_cap = config.attention_soft_cap;
  model.head_soft_cap = config.head_soft_cap;
  model.family = config.family;
  model.has_dropout = config.has_dropout;
  model.facts = info_of(config);
  return model;
}

}  // namespace spillway::models
