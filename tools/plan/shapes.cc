#include "tools/plan/shapes.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <rapidjson/error/en.h>

#include <algorithm>
#include <cmath>

#include "spillway/error.h"

namespace spillway::planning {
namespace {

constexpr std::uint32_t kLargest = 1u << 24;  // of any size in the file; keeps products of two far inside 64 bits
constexpr std::uint32_t kMostLayers = 1u << 14;

// Keys of config.json; null stands for missing, as in transformers.
class Fields {
 public:
  Fields(const rapidjson::Value& object, const std::string& name) : object_(object), name_(name) {}

  [[noreturn]] void refuse(std::string happened, std::string hint) const {
    throw Error(Code::kInvalidArgument,
                {.object = name_, .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
  }

  std::uint32_t size(const char* key, std::optional<std::uint32_t> otherwise = {},
                     std::uint32_t most = kLargest) const {
    const auto* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) refuse(fmt::format("\"{}\" is missing", key), "take the file as the model came with it");
    if (!value->IsUint() || value->GetUint() == 0 || value->GetUint() > most) {
      refuse(fmt::format("\"{}\" is not a whole number from 1 to {}", key, most), "repair the file");
    }
    return value->GetUint();
  }
  bool flag(const char* key, bool otherwise) const {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->IsBool()) refuse(fmt::format("\"{}\" is not true or false", key), "repair the file");
    return value->GetBool();
  }
  std::string text(const char* key, const char* otherwise) const {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->IsString()) refuse(fmt::format("\"{}\" is not a string", key), "repair the file");
    return {value->GetString(), value->GetStringLength()};
  }
  // What the heads take together is a size like the others.
  void check_heads(const ModelShape& shape) const {
    if (shape.query_width() <= kLargest) return;
    refuse(fmt::format("{} heads of width {} are wider than {}", shape.heads, shape.head_width, kLargest),
           "repair the file");
  }
  bool has(const char* key) const { return find(key) != nullptr; }

 private:
  const rapidjson::Value* find(const char* key) const {
    const auto member = object_.FindMember(key);
    return member == object_.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
  }

  const rapidjson::Value& object_;
  const std::string& name_;
};

// Llama (LlamaConfig), Mistral, Qwen2 and Qwen3: a pre-norm decoder with rotary positions and a gated MLP.
ModelShape decoder_shape(const Fields& fields, const std::string& family) {
  const bool qwen = family.starts_with("qwen");
  ModelShape shape{.family = family};
  shape.layers = fields.size("num_hidden_layers", {}, kMostLayers);
  shape.width = fields.size("hidden_size");
  shape.inner = fields.size("intermediate_size");
  shape.vocabulary = fields.size("vocab_size");
  shape.positions = fields.size("max_position_embeddings", 0);
  shape.heads = fields.size("num_attention_heads");
  shape.kv_heads = fields.size("num_key_value_heads", shape.heads);
  if (shape.heads % shape.kv_heads != 0) {
    fields.refuse(fmt::format("\"num_attention_heads\" {} is not a multiple of \"num_key_value_heads\" {}", shape.heads,
                              shape.kv_heads),
                  "repair the file");
  }
  if (!fields.has("head_dim") && shape.width % shape.heads != 0) {
    fields.refuse(
        fmt::format("\"hidden_size\" {} is not a multiple of \"num_attention_heads\" {}", shape.width, shape.heads),
        "say \"head_dim\", or repair the file");
  }
  // Qwen3's own default; the others divide.
  shape.head_width = fields.size("head_dim", family == "qwen3" ? 128 : std::max(1u, shape.width / shape.heads));
  fields.check_heads(shape);
  const bool slides = family == "mistral" || (qwen && fields.flag("use_sliding_window", false));
  if (slides && fields.has("sliding_window")) shape.window = fields.size("sliding_window");
  shape.tied = fields.flag("tie_word_embeddings", false);
  const bool biased = family != "qwen2" && fields.flag("attention_bias", false);
  shape.query_bias = biased || family == "qwen2";
  shape.output_bias = biased;
  shape.mlp_bias = family == "llama" && fields.flag("mlp_bias", false);
  shape.query_norm = family == "qwen3";
  return shape;
}

ModelShape t5_shape(const Fields& fields) {
  ModelShape shape{.family = "t5"};
  shape.layers = fields.size("num_layers", 6, kMostLayers);
  shape.decoder_layers = fields.size("num_decoder_layers", shape.layers, kMostLayers);
  shape.width = fields.size("d_model", 512);
  shape.inner = fields.size("d_ff", 2048);
  shape.vocabulary = fields.size("vocab_size", 32128);
  shape.heads = shape.kv_heads = fields.size("num_heads", 8);
  shape.head_width = fields.size("d_kv", 64);
  fields.check_heads(shape);
  shape.buckets = fields.size("relative_attention_num_buckets", 32);
  shape.gated = fields.text("feed_forward_proj", "relu").starts_with("gated-");
  shape.tied = fields.flag("tie_word_embeddings", true);
  return shape;
}

ModelShape gpt2_shape(gpt2::ModelConfig model) {
  ModelShape shape{.family = "gpt2"};
  shape.layers = model.layers;
  shape.width = model.width;
  shape.inner = model.inner;
  shape.vocabulary = model.vocabulary;
  shape.positions = model.positions;
  shape.heads = shape.kv_heads = model.heads;
  shape.head_width = model.width / model.heads;
  shape.tied = shape.query_bias = shape.output_bias = shape.mlp_bias = true;
  shape.gated = false;
  shape.gpt2 = std::move(model);
  return shape;
}

}  // namespace

ModelShape parse_shape(std::string_view text, const std::string& name) {
  rapidjson::Document document;
  document.Parse<rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag>(text.data(), text.size());
  const rapidjson::Value nothing(rapidjson::kObjectType);
  const Fields problems(nothing, name);
  if (document.HasParseError()) {
    std::string what = rapidjson::GetParseError_En(document.GetParseError());
    while (what.ends_with('.')) what.pop_back();
    problems.refuse(fmt::format("not valid JSON at byte {}: {}", document.GetErrorOffset(), what), "repair the file");
  }
  if (!document.IsObject()) problems.refuse("is not a JSON object", "repair the file");
  const Fields fields(document, name);
  constexpr const char* kFamilies = "gpt2, llama, mistral, qwen2, qwen3 and t5 are known";
  const std::string family = fields.text("model_type", "");
  if (family == "gpt2") return gpt2_shape(gpt2::parse_model_config(text, name));
  if (family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3")
    return decoder_shape(fields, family);
  if (family == "t5") return t5_shape(fields);
  fields.refuse(family.empty() ? "\"model_type\" is missing" : fmt::format("\"model_type\" is \"{}\"", family),
                std::string(kFamilies) + "; --params plans for a number of parameters");
}

ModelShape load_shape(const std::filesystem::path& directory) {
  const gpt2::ModelText file = gpt2::read_model_text(directory);
  return parse_shape(file.text, file.name);
}

// Published models grow in width and depth together, in width a little faster: width / depth is 64 at 124 M parameters
// (gpt2), 128 at 175 B (Brown et al. 2020, table 2.1), 200 at 1 T (Narayanan et al. 2021, table 1).
ModelShape shape_of_size(double parameters, std::uint32_t sequence) {
  gpt2::ModelConfig model;
  model.positions = std::max(model.positions, sequence);
  const double aspect = 64 * std::pow(std::max(parameters, 124e6) / 124e6, 0.125);
  const auto table = [&](double width) { return (model.vocabulary + model.positions) * width; };
  double low = 1, high = 1 << 22;
  for (int i = 0; i < 100; ++i) {
    const double width = (low + high) / 2;
    (12 * width * width * width / aspect + table(width) < parameters ? low : high) = width;
  }
  const double head = high >= 3072 ? 128 : 64;
  const double width = std::max(head, std::round(high / head) * head);
  model.width = static_cast<std::uint32_t>(width);
  model.heads = static_cast<std::uint32_t>(width / head);
  model.inner = 4 * model.width;
  const double layers = std::round((parameters - table(width)) / (12 * width * width + 13 * width));
  model.layers = static_cast<std::uint32_t>(std::clamp(layers, 1.0, static_cast<double>(gpt2::kMostLayers)));
  model.text = gpt2::model_config_text(model, DType::kBFloat16);
  return gpt2_shape(std::move(model));
}

}  // namespace spillway::planning
