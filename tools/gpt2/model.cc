#include "tools/gpt2/model.h"

#include <fmt/format.h>
#include <rapidjson/document.h>
#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <utility>

#include "spillway/error.h"

namespace spillway::gpt2 {
namespace {

constexpr std::uint32_t kLargest = 1u << 24;    // of any size in the file; keeps products of two far inside 64 bits
constexpr std::uintmax_t kMostBytes = 4 << 20;  // the file is a few KB; anything near this is another one

// Goes over a text before it becomes a document: ends at what has no place in one, and finds the weights' type.
class Overview : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, Overview> {
 public:
  explicit Overview(const rapidjson::MemoryStream& stream) : stream_(stream) {}

  bool Default() {
    type_from_ = 0;
    return true;
  }
  bool Double(double value) {
    if (!std::isfinite(value)) problem_ = "holds a number that is too large";
    return Default() && problem_ == nullptr;
  }
  bool StartObject() {
    if (++depth_ > kDeepest) problem_ = "is nested too deep";
    return Default() && problem_ == nullptr;
  }
  bool StartArray() { return StartObject(); }
  bool EndObject(rapidjson::SizeType) { return depth_-- > 0; }
  bool EndArray(rapidjson::SizeType) { return depth_-- > 0; }
  bool Key(const char* data, rapidjson::SizeType size, bool) {
    const std::string_view key(data, size);
    type_from_ = depth_ == 1 && (key == "torch_dtype" || key == "dtype") ? stream_.Tell() : 0;
    return true;
  }
  bool String(const char* data, rapidjson::SizeType size, bool) {
    if (type_from_ > 0 && std::string_view(data, size) != "float32") types_.push_back({type_from_, stream_.Tell()});
    return Default();
  }

  const char* problem() const { return problem_; }
  // Trained weights are exported as fp32 masters; transformers casts to the type named here as it loads.
  std::string exported(std::string_view text) const {
    std::string result;
    std::size_t done = 0;
    for (const auto& [from, end] : types_) {
      result += text.substr(done, from - done);
      result += ": \"float32\"";
      done = end;
    }
    return result += text.substr(done);
  }

 private:
  static constexpr int kDeepest = 64;

  const rapidjson::MemoryStream& stream_;
  int depth_ = 0;
  std::size_t type_from_ = 0;                               // where the key of a type ended; 0: this is no type
  std::vector<std::pair<std::size_t, std::size_t>> types_;  // from there to the end of its value
  const char* problem_ = nullptr;
};

// Parses `text` into `document` and returns the text to export with the trained model. Throws what is wrong.
std::string parse(std::string_view text, const std::string& name, rapidjson::Document& document) {
  const auto refuse = [&](std::string happened) {
    throw Error(Code::kInvalidArgument,
                {.object = name, .happened = std::move(happened), .errno_value = 0, .hint = "repair the file"});
  };
  // RapidJSON takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos) refuse(fmt::format("holds a zero byte at byte {}", zero));
  constexpr unsigned kFlags = rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag;
  rapidjson::MemoryStream stream(text.data(), text.size());
  Overview overview(stream);
  const rapidjson::ParseResult result = rapidjson::Reader().Parse<kFlags>(stream, overview);
  if (overview.problem() != nullptr) refuse(overview.problem());
  if (result.IsError()) {
    std::string what = rapidjson::GetParseError_En(result.Code());
    while (what.ends_with('.')) what.pop_back();  // it goes into a sentence of ours
    refuse(fmt::format("not valid JSON at byte {}: {}", result.Offset(), what));
  }
  document.Parse<kFlags>(text.data(), text.size());
  if (!document.IsObject()) refuse("is not a JSON object");
  return overview.exported(text);
}

// Reads keys of one JSON object; a missing key takes its default, a wrong one is an error.
class Fields {
 public:
  Fields(const rapidjson::Value& object, const std::string& name) : object_(object), name_(name) {}

  [[noreturn]] void refuse(const std::string& happened,
                           const std::string& hint = "see transformers' GPT2Config for what it may hold") const {
    throw Error(Code::kInvalidArgument, {.object = name_, .happened = happened, .errno_value = 0, .hint = hint});
  }

  // Null where the key is missing or null.
  const rapidjson::Value* find(const char* key) const {
    const auto member = object_.FindMember(key);
    return member == object_.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
  }

  std::uint32_t size(const char* key, std::uint32_t otherwise, std::uint32_t most = kLargest) const {
    const auto* value = find(key);
    if (value == nullptr) {
      if (otherwise == 0) refuse(fmt::format("\"{}\" is missing", key));
      return otherwise;
    }
    if (!value->IsUint() || value->GetUint() == 0 || value->GetUint() > most) {
      refuse(fmt::format("\"{}\" must be a whole number from 1 to {}", key, most));
    }
    return value->GetUint();
  }

  double number(const char* key, double otherwise) const {
    const auto* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->IsNumber()) refuse(fmt::format("\"{}\" must be a number", key));
    return value->GetDouble();
  }

  void require_text(const char* key, std::string_view wanted) const {
    const auto* value = find(key);
    if (value == nullptr) return;
    if (!value->IsString()) refuse(fmt::format("\"{}\" must be a string", key));
    const std::string_view text(value->GetString(), value->GetStringLength());
    if (text != wanted) {
      refuse(fmt::format("\"{}\" is \"{}\"", key, text),
             fmt::format("only the GPT-2 family is trained, with \"{}\"", wanted));
    }
  }

  void require_flag(const char* key, bool wanted) const {
    const auto* value = find(key);
    if (value == nullptr) return;
    if (!value->IsBool()) refuse(fmt::format("\"{}\" must be true or false", key));
    if (value->GetBool() != wanted) {
      refuse(fmt::format("\"{}\" is {}", key, !wanted), fmt::format("only models with {} are trained", wanted));
    }
  }

 private:
  const rapidjson::Value& object_;
  const std::string& name_;
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

ModelConfig parse_model_config(std::string_view text, const std::string& name) {
  rapidjson::Document document;
  std::string exported = parse(text, name, document);
  const Fields fields(document, name);
  if (fields.find("model_type") == nullptr) fields.refuse("\"model_type\" is missing", "it must be \"gpt2\"");
  fields.require_text("model_type", "gpt2");
  fields.require_text("activation_function", "gelu_new");
  fields.require_flag("tie_word_embeddings", true);
  fields.require_flag("scale_attn_weights", true);
  fields.require_flag("scale_attn_by_inverse_layer_idx", false);
  fields.require_flag("add_cross_attention", false);

  ModelConfig config;
  config.layers = fields.size("n_layer", 0, kMostLayers);
  config.width = fields.size("n_embd", 0);
  config.heads = fields.size("n_head", 0);
  if (config.width % config.heads != 0) {
    fields.refuse(fmt::format("\"n_embd\" {} is not a multiple of \"n_head\" {}", config.width, config.heads));
  }
  if (config.width > kLargest / 4) fields.refuse(fmt::format("\"n_embd\" is larger than {}", kLargest / 4));
  config.inner = fields.size("n_inner", 4 * config.width);
  config.positions = fields.size("n_positions", fields.size("n_ctx", 1024));
  config.vocabulary = fields.size("vocab_size", 50257);
  const double epsilon = fields.number("layer_norm_epsilon", 1e-5);
  if (epsilon <= 1) config.epsilon = static_cast<float>(epsilon);
  if (!(epsilon <= 1 && config.epsilon > 0)) fields.refuse("\"layer_norm_epsilon\" must be above 0 and at most 1");
  for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    // Absent means transformers' default of 0.1.
    config.has_dropout = config.has_dropout || fields.number(dropout, 0.1) != 0;
  }
  config.text = std::move(exported);
  return config;
}

ModelText read_model_text(const std::filesystem::path& directory) {
  const auto path = directory / "config.json";
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  const bool is_there = std::filesystem::exists(status), is_file = std::filesystem::is_regular_file(status);
  if (is_there && (!is_file || std::filesystem::file_size(path, error) > kMostBytes)) {
    throw Error(Code::kInvalidArgument,
                {.object = path.string(),
                 .happened = is_file ? fmt::format("is larger than {} bytes", kMostBytes) : "is not a regular file",
                 .errno_value = 0,
                 .hint = "--model wants the directory of a model"});
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(Code::kNotFound, {.object = path.string(),
                                  .happened = "cannot be opened",
                                  .errno_value = errno,
                                  .hint = "--model wants a directory with config.json and model.safetensors"});
  }
  return {.name = path.string(), .text = {std::istreambuf_iterator<char>(file), {}}};
}

ModelConfig load_model_config(const std::filesystem::path& directory) {
  const ModelText file = read_model_text(directory);
  return parse_model_config(file.text, file.name);
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

Shape shape_of(const ModelConfig& config, DType type, std::uint32_t batch, std::uint32_t sequence) {
  return {.type = type,
          .batch = batch,
          .sequence = sequence,
          .width = config.width,
          .heads = config.heads,
          .inner = config.inner,
          .vocabulary = config.vocabulary,
          .positions = config.positions,
          .epsilon = config.epsilon};
}

}  // namespace spillway::gpt2
