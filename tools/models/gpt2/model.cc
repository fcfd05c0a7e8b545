#include "tools/models/gpt2/model.h"

#include <fmt/format.h>

#include <utility>

#include "tools/models/config_json.h"

namespace spillway::models {
namespace {

// Keys of some files that transformers does not compute a language model with.
constexpr std::string_view kUnusedByGpt2[] = {
    "gradient_checkpointing",
    "reorder_and_upcast_attn",  // the same scores, in fp32
    "summary_activation",      "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
};

Parameter parameter(std::string name, std::vector<std::uint64_t> shape) {
  return {.name = "transformer." + std::move(name), .shape = std::move(shape), .trainable = true, .pushes = 1};
}

Block describe_layer(const ModelConfig& config, std::uint32_t layer) {
  const std::uint64_t width = config.width, inner = config.inner;
  const auto name = [&](const char* rest) { return fmt::format("h.{}.{}", layer, rest); };
  Block block{.name = fmt::format("layer {}", layer), .parameters = {}};
  // In the order of LayerParameter.
  block.parameters = {parameter(name("ln_1.weight"), {width}),
                      parameter(name("ln_1.bias"), {width}),
                      parameter(name("attn.c_attn.weight"), {width, 3 * width}),
                      parameter(name("attn.c_attn.bias"), {3 * width}),
                      parameter(name("attn.c_proj.weight"), {width, width}),
                      parameter(name("attn.c_proj.bias"), {width}),
                      parameter(name("ln_2.weight"), {width}),
                      parameter(name("ln_2.bias"), {width}),
                      parameter(name("mlp.c_fc.weight"), {width, inner}),
                      parameter(name("mlp.c_fc.bias"), {inner}),
                      parameter(name("mlp.c_proj.weight"), {inner, width}),
                      parameter(name("mlp.c_proj.bias"), {width})};
  return block;
}

}  // namespace

ModelConfig model_config(const ConfigJson& json) {
  const auto require = [&](const char* key, const std::string& wanted) {
    if (const std::string text = json.text(key, wanted); text != wanted) {
      json.refuse(fmt::format("\"{}\" is \"{}\"", key, text),
                  fmt::format("only the GPT-2 family is trained, with \"{}\"", wanted));
    }
  };
  const auto require_flag = [&](const char* key, bool wanted) {
    if (json.flag(key, wanted) != wanted) {
      json.refuse(fmt::format("\"{}\" is {}", key, !wanted), fmt::format("only models with {} are trained", wanted));
    }
  };
  if (!json.has("model_type")) json.refuse("\"model_type\" is missing", "it must be \"gpt2\"");
  require("model_type", "gpt2");
  require("activation_function", "gelu_new");
  require_flag("tie_word_embeddings", true);
  require_flag("scale_attn_weights", true);
  require_flag("scale_attn_by_inverse_layer_idx", false);
  require_flag("add_cross_attention", false);

  ModelConfig config;
  config.layers = json.size("n_layer", {}, kMostLayers);
  config.width = json.size("n_embd", {}, kLargestSize / 4);
  config.heads = json.size("n_head");
  if (config.width % config.heads != 0) {
    json.refuse(fmt::format("\"n_embd\" {} is not a multiple of \"n_head\" {}", config.width, config.heads));
  }
  config.inner = json.size("n_inner", 4 * config.width);
  config.positions = json.size("n_positions", json.size("n_ctx", 1024));
  config.vocabulary = json.size("vocab_size", 50257);
  const double epsilon = json.number("layer_norm_epsilon", 1e-5);
  if (epsilon <= 1) config.epsilon = static_cast<float>(epsilon);
  if (!(epsilon <= 1 && config.epsilon > 0)) json.refuse("\"layer_norm_epsilon\" must be above 0 and at most 1");
  for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    // Absent means transformers' default of 0.1.
    config.has_dropout = config.has_dropout || json.number(dropout, 0.1) != 0;
  }
  json.refuse_unread(kUnusedByGpt2);
  config.text = json.text();
  return config;
}

ModelConfig parse_model_config(std::string_view text, const std::string& name) {
  return model_config(ConfigJson(text, name));
}

ModelConfig load_model_config(const std::filesystem::path& directory) {
  return model_config(ConfigJson::load(directory));
}

std::string model_config_text(const ModelConfig& config, DType stored) {
  return fmt::format(R"({{
  "activation_function": "gelu_new",
  "architectures": ["GPT2LMHeadModel"],
  "attn_pdrop": 0.0,
  "bos_token_id": {last},
  "embd_pdrop": 0.0,
  "eos_token_id": {last},
  "initializer_range": 0.02,
  "layer_norm_epsilon": {epsilon},
  "model_type": "gpt2",
  "n_embd": {width},
  "n_head": {heads},
  "n_inner": {inner},
  "n_layer": {layers},
  "n_positions": {positions},
  "resid_pdrop": 0.0,
  "tie_word_embeddings": true,
  "torch_dtype": "{type}",
  "vocab_size": {vocabulary}
}}
)",
                     fmt::arg("last", config.vocabulary - 1), fmt::arg("epsilon", config.epsilon),
                     fmt::arg("width", config.width), fmt::arg("heads", config.heads), fmt::arg("inner", config.inner),
                     fmt::arg("layers", config.layers), fmt::arg("positions", config.positions),
                     fmt::arg("type", stored == DType::kFloat32    ? "float32"
                                      : stored == DType::kBFloat16 ? "bfloat16"
                                                                   : "float16"),
                     fmt::arg("vocabulary", config.vocabulary));
}

ModelDescription describe_model(const ModelConfig& config, std::uint64_t workspace_bytes) {
  const std::uint64_t width = config.width;
  ModelDescription model;
  // In the order of EmbeddingParameter.
  model.blocks.push_back({.name = "embedding",
                          .parameters = {parameter("wte.weight", {config.vocabulary, width}),
                                         parameter("wpe.weight", {config.positions, width}),
                                         parameter("ln_f.weight", {width}), parameter("ln_f.bias", {width})}});
  for (std::uint32_t l = 0; l < config.layers; ++l) model.blocks.push_back(describe_layer(config, l));

  model.visits.push_back({kEmbeddingBlock, Pass::kForward});
  for (std::uint32_t l = 0; l < config.layers; ++l) model.visits.push_back({layer_block(l), Pass::kForward});
  model.visits.push_back({kEmbeddingBlock, Pass::kBackward});
  for (std::uint32_t l = config.layers; l-- > 0;) model.visits.push_back({layer_block(l), Pass::kBackward});
  model.visits.push_back({kEmbeddingBlock, Pass::kBackward});

  model.workspace_bytes = workspace_bytes;
  model.attachments.push_back({.name = "config.json", .text = config.text});
  return model;
}

std::uint64_t elements(const Parameter& parameter) {
  std::uint64_t count = 1;
  for (const auto extent : parameter.shape) count *= extent;
  return count;
}

TrainedModel trained_gpt2(const ModelConfig& config) {
  TrainedModel model;
  model.description = describe_model(config, 0);
  model.token_weight = model.head_weight = kTokenWeight;
  model.position_weight = kPositionWeight;
  model.final_norm = {kFinalNormWeight, kFinalNormBias};
  model.layers.assign(config.layers, {.attention_norm = {kNorm1Weight, kNorm1Bias},
                                      .mlp_norm = {kNorm2Weight, kNorm2Bias},
                                      .qkv = {{kAttentionWeight, kAttentionBias, 3 * config.width}},
                                      .attention_out = {kAttentionOutWeight, kAttentionOutBias, config.width},
                                      .mlp = {{kMlpWeight, kMlpBias, config.inner}},
                                      .mlp_out = {kMlpOutWeight, kMlpOutBias, config.width}});
  model.width = config.width;
  model.heads = config.heads;
  model.inner = config.inner;
  model.vocabulary = config.vocabulary;
  model.positions = config.positions;
  model.epsilon = config.epsilon;
  model.family = "gpt2";
  model.has_dropout = config.has_dropout;
  model.facts = {{"n_head", fmt::format("{}", config.heads)},
                 {"layer_norm_epsilon", fmt::format("{}", config.epsilon)}};
  return model;
}

}  // namespace spillway::models
