#include "tools/models/decoder/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

#include "tools/models/config_json.h"
#include "tools/models/decoder/rotary_config.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/linear.h"

namespace spillway::models {
namespace {

// Which layers look back over a window only, where the file has no layer_types.
enum class Windows : std::uint8_t {
  kNone,
  kAll,
  kUpper,    // from max_window_layers on, if use_sliding_window
  kPattern,  // all but every `pattern`-th
};

// What transformers takes where the file is silent, and what a file can ask for.
struct Family {
  std::string_view name;
  std::uint32_t head_width;  // 0: width / heads
  bool heads_as_heads;       // without num_key_value_heads there are as many as heads; else another number
  double epsilon;
  Windows windows;
  std::optional<std::uint32_t> window;
  std::uint32_t pattern;
  bool attention_bias, mlp_bias;  // keys that it reads
};
constexpr Family kFamilies[] = {
    {"llama", 0, true, 1e-6, Windows::kNone, {}, 0, true, true},
    {"mistral", 0, false, 1e-6, Windows::kAll, 4096, 0, false, false},
    {"qwen2", 0, false, 1e-6, Windows::kUpper, 4096, 0, false, false},
    {"qwen3", 128, false, 1e-6, Windows::kUpper, 4096, 0, true, false},
    {"phi3", 0, true, 1e-5, Windows::kAll, {}, 0, false, false},
    {"gemma2", 256, false, 1e-6, Windows::kPattern, 4096, 2, true, false},
    {"gemma3_text", 256, false, 1e-6, Windows::kPattern, 4096, 6, true, false},
};

// Keys of some files that transformers does not compute with.
constexpr std::string_view kUnusedByDecoders[] = {
    "dual_chunk_attention_config",  // how vLLM computes Qwen2.5's rows beyond 262,144 tokens
    "is_llama_config",              // SmolLM2's
    "max_sequence_length",          // the first Llama's, beside max_position_embeddings
    "pretraining_tp",               // the same products, in slices
    "sliding_window_size",          // Gemma 2's older files, beside sliding_window
};

// Keys of some files, with the only value that is computed here (and in transformers).
struct Fixed {
  const char* key;
  bool value;
};
constexpr Fixed kFixed[] = {
    {"attention_bias", false}, {"lm_head_bias", false},     {"mlp_bias", false},
    {"qk_layer_norms", false}, {"rope_interleaved", false}, {"use_bidirectional_attention", false},
    {"use_mrope", false},
};

const Family* find_family(std::string_view name) {
  const auto* found = std::ranges::find(kFamilies, name, &Family::name);
  return found == std::end(kFamilies) ? nullptr : found;
}

bool is_gemma(const Family& family) { return family.name.starts_with("gemma"); }

const Family& family_of(const ConfigJson& json) {
  const std::string name = json.text("model_type", "");
  if (const Family* family = find_family(name)) return *family;
  const std::string says = name.empty() ? "\"model_type\" is missing" : fmt::format("\"model_type\" is \"{}\"", name);
  if (name.ends_with("moe") || name == "mixtral") json.refuse(says, "mixtures of experts are not trained");
  if (name == "gemma3") json.refuse(says, "a model that sees pictures is not trained; gemma3_text is");
  std::vector<std::string_view> families = decoder_families();
  const std::string_view last = families.back();
  families.pop_back();
  json.refuse(says, fmt::format("{} and {} are trained, and gpt2", fmt::join(families, ", "), last));
}

// 0: none.
std::uint32_t window_of(const ConfigJson& json, const Family& family) {
  const bool silent = !json.has("sliding_window") && !json.is_null("sliding_window");
  const std::uint32_t window = silent ? family.window.value_or(0) : json.size("sliding_window", 0, UINT32_MAX);
  return family.windows == Windows::kUpper && !json.flag("use_sliding_window", false) ? 0 : window;
}

// Of the families whose layers may differ: whether each looks back over the window only.
std::vector<bool> sliding_layers(const ConfigJson& json, const Family& family, std::uint32_t layers, bool any) {
  std::vector<bool> sliding(layers);
  if (family.windows == Windows::kUpper) {
    const double first = json.number("max_window_layers", 28);
    for (std::uint32_t l = 0; l < layers; ++l) sliding[l] = any && l >= first;
  } else {
    std::uint32_t pattern = family.pattern;
    if (family.name == "gemma3_text") {
      pattern = json.size("sliding_window_pattern", pattern);
      // Newer files have it beside the layer_types that it made; transformers does not read it.
      if (json.size("_sliding_window_pattern", pattern) != pattern && !json.has("layer_types"))
        json.refuse("\"_sliding_window_pattern\" is there without \"layer_types\"");
    }
    for (std::uint32_t l = 0; l < layers; ++l) sliding[l] = (l + 1) % pattern != 0;
  }
  if (!json.has("layer_types")) return sliding;
  const std::vector<std::string> types = json.texts("layer_types");
  if (types.size() != layers)
    json.refuse(fmt::format("\"layer_types\" has {} layers, and there are {}", types.size(), layers));
  for (std::uint32_t l = 0; l < layers; ++l) {
    sliding[l] = types[l] == "sliding_attention";
    if (!sliding[l] && types[l] != "full_attention")
      json.refuse(fmt::format("\"layer_types\" has \"{}\"", types[l]), "full and sliding attention are known");
  }
  return sliding;
}

std::vector<DecoderConfig::Layer> read_layers(const ConfigJson& json, const Family& family, std::uint32_t layers) {
  std::vector<DecoderConfig::Layer> rules(layers);
  if (family.windows == Windows::kNone) return rules;
  const std::uint32_t window = window_of(json, family);
  const bool all = family.windows == Windows::kAll;
  const std::vector<bool> sliding =
      all ? std::vector<bool>(layers, window > 0) : sliding_layers(json, family, layers, window > 0);
  for (std::uint32_t l = 0; l < layers; ++l) {
    if (!sliding[l]) continue;
    if (window == 0) json.refuse(fmt::format("layer {} looks back over a window, and none is said", l));
    rules[l] = {.window = window, .rotary = family.name == "gemma3_text" ? 1u : 0u};
  }
  return rules;
}

DecoderConfig read_sizes(const ConfigJson& json, const Family& family) {
  DecoderConfig model;
  model.family = family.name;
  model.layers = json.size("num_hidden_layers", {}, kMostLayers);
  model.width = json.size("hidden_size");
  model.inner = json.size("intermediate_size");
  model.vocabulary = json.size("vocab_size");
  model.positions = json.size("max_position_embeddings", 0);
  model.heads = json.size("num_attention_heads");
  // null is as many as heads; where the key is not there, some families take a number that means nothing here.
  if (!family.heads_as_heads && !json.has("num_key_value_heads") && !json.is_null("num_key_value_heads"))
    json.refuse("\"num_key_value_heads\" is missing");
  model.kv_heads = json.size("num_key_value_heads", model.heads);
  if (model.heads % model.kv_heads != 0) {
    json.refuse(fmt::format("\"num_attention_heads\" {} is not a multiple of \"num_key_value_heads\" {}", model.heads,
                            model.kv_heads));
  }
  if (!json.has("head_dim") && family.head_width == 0 && model.width % model.heads != 0) {
    json.refuse(
        fmt::format("\"hidden_size\" {} is not a multiple of \"num_attention_heads\" {}", model.width, model.heads),
        "say \"head_dim\", or repair the file");
  }
  const std::uint32_t head_width = family.head_width != 0 ? family.head_width : model.width / model.heads;
  model.head_width = json.size("head_dim", std::max(1u, head_width));
  check_heads(json, model.heads, model.head_width);
  model.layer_rules = read_layers(json, family, model.layers);
  const bool gemma = is_gemma(family);
  model.tied = json.flag("tie_word_embeddings", gemma);
  model.output_bias = family.attention_bias && json.flag("attention_bias", false);
  model.qkv_bias = model.output_bias || family.name == "qwen2";
  model.mlp_bias = family.mlp_bias && json.flag("mlp_bias", false);
  model.query_norm = family.name == "qwen3" || family.name == "gemma3_text";
  model.norms_after = gemma;
  model.fused = family.name == "phi3";
  return model;
}

Activation activation_of(const ConfigJson& json, const char* key, std::string_view otherwise) {
  const std::string name = json.text(key, otherwise);
  if (name == "silu" || name == "swish") return Activation::kSilu;
  // Four names for one formula.
  for (const char* tanh : {"gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"}) {
    if (name == tanh) return Activation::kGeluTanh;
  }
  if (name == "gelu" || name == "gelu_python") return Activation::kGelu;
  json.refuse(fmt::format("\"{}\" is \"{}\"", key, name), "silu, gelu_pytorch_tanh and gelu are trained");
}

// 0 where the file has null; `otherwise` where it is silent.
float soft_cap(const ConfigJson& json, const char* key, double otherwise) {
  const double cap = json.number(key, json.is_null(key) ? 0 : otherwise);
  if (cap < 0 || (cap == 0 && json.has(key))) json.refuse(fmt::format("\"{}\" is {}, and must be above 0", key, cap));
  return static_cast<float>(cap);
}

void read_gemma(const ConfigJson& json, DecoderConfig& model) {
  model.norm_offset = 1;
  model.scaled_embedding = true;
  model.activation = activation_of(json, "hidden_activation", "gelu_pytorch_tanh");
  // An older name, which transformers does not read.
  if (json.has("hidden_act") && activation_of(json, "hidden_act", "") != model.activation)
    json.refuse("\"hidden_act\" is not the \"hidden_activation\" that counts", "leave \"hidden_activation\" alone");
  const double scalar = json.number("query_pre_attn_scalar", 256);
  if (!(scalar > 0)) json.refuse(fmt::format("\"query_pre_attn_scalar\" is {}, and must be above 0", scalar));
  model.attention_scale = static_cast<float>(1 / std::sqrt(scalar));
  const bool second = model.family == "gemma2";
  model.head_soft_cap = soft_cap(json, "final_logit_softcapping", second ? 30 : 0);
  model.attention_soft_cap = soft_cap(json, "attn_logit_softcapping", second ? 50 : 0);
  if (!second && model.attention_soft_cap != 0) {
    json.refuse(fmt::format("\"attn_logit_softcapping\" is {}", model.attention_soft_cap),
                "transformers does not compute it for Gemma 3");
  }
}

void read_epsilon(const ConfigJson& json, const Family& family, DecoderConfig& model) {
  const double epsilon = json.number("rms_norm_eps", family.epsilon);
  if (epsilon <= 1) model.epsilon = static_cast<float>(epsilon);
  if (!(epsilon <= 1 && model.epsilon > 0)) json.refuse("\"rms_norm_eps\" must be above 0 and at most 1");
}

// The rest of the file: nothing in it may go unread that would make another model.
void refuse_rest(const ConfigJson& json) {
  if (json.has("quantization_config"))
    json.refuse("\"quantization_config\" is there: its weights are quantized", "take the model in bf16, fp16 or fp32");
  for (const auto& [key, value] : kFixed) {
    const auto unread = json.unread();
    if (std::ranges::find(unread, key) != unread.end() && json.flag(key, value) != value)
      json.refuse(fmt::format("\"{}\" is {}", key, !value), fmt::format("only models with {} are trained", value));
  }
  for (const char* key : {"full_attn_mod", "interpolate_factor"}) {  // Phi-4-mini's
    if (const double value = json.number(key, 1); value != 1)
      json.refuse(fmt::format("\"{}\" is {}", key, value), "only models with 1 are trained");
  }
  json.refuse_unread(kUnusedByDecoders);
}

}  // namespace

std::vector<std::string_view> decoder_families() {
  std::vector<std::string_view> names;
  for (const Family& family : kFamilies) names.push_back(family.name);
  return names;
}

bool is_decoder(const std::string& family) { return find_family(family) != nullptr; }

DecoderConfig decoder_sizes(const ConfigJson& json) { return read_sizes(json, family_of(json)); }

DecoderConfig decoder_config(const ConfigJson& json) {
  const Family& family = family_of(json);
  DecoderConfig model = read_sizes(json, family);
  if (model.positions == 0) json.refuse("\"max_position_embeddings\" is missing");
  read_epsilon(json, family, model);
  if (is_gemma(family)) {
    read_gemma(json, model);
  } else {
    model.activation = activation_of(json, "hidden_act", "silu");
  }
  model.rotary = read_rotary(json, model);
  for (const char* dropout : {"attention_dropout", "resid_pdrop", "embd_pdrop"}) {
    if (model.family == "phi3" || dropout == std::string_view("attention_dropout"))
      model.has_dropout = json.number(dropout, 0) != 0 || model.has_dropout;
  }
  refuse_rest(json);
  model.text = json.text();
  return model;
}

float DecoderConfig::embedding_scale() const {
  return scaled_embedding ? static_cast<float>(std::sqrt(static_cast<double>(width))) : 1.0f;
}

}  // namespace spillway::models
