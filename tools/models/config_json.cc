#include "tools/models/config_json.h"

#include <fmt/format.h>
#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "spillway/error.h"

namespace spillway::models {
namespace {

constexpr std::uintmax_t kMostBytes = 4 << 20;  // the file is a few KB; anything near this is another one
constexpr const char* kRepair = "repair the file";
// Where the file comes from, what generates text, how PyTorch computes, what is for other tasks. pad_token_id does
// change something where a text has that token: PyTorch takes no gradient of its row of the embedding.
constexpr auto kOfAnyModel = std::to_array<std::string_view>({
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attn_implementation",
    "auto_map",  // code beside the file, for versions of transformers without the family
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
});

// Goes over a text before it becomes a document, and ends at what has no place in one.
class Overview : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, Overview> {
 public:
  bool Double(double value) {
    if (!std::isfinite(value)) problem_ = "holds a number that is too large";
    return problem_ == nullptr;
  }
  bool StartObject() { return begin(); }
  bool StartArray() { return begin(); }
  // Which one of two would count differs from reader to reader.
  bool Key(const char* name, rapidjson::SizeType length, bool) {
    if (!keys_.back().emplace(name, length).second) problem_ = "has a key twice";
    return problem_ == nullptr;
  }
  bool EndObject(rapidjson::SizeType) { return end(); }
  bool EndArray(rapidjson::SizeType) { return end(); }

  const char* problem() const { return problem_; }

 private:
  static constexpr std::size_t kDeepest = 64;

  bool begin() {
    if (keys_.size() == kDeepest) problem_ = "is nested too deep";
    keys_.emplace_back();
    return problem_ == nullptr;
  }
  bool end() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string, std::less<>>> keys_;  // of every object that is open, empty for an array
  const char* problem_ = nullptr;
};

}  // namespace

ConfigJson::ConfigJson(std::string_view text, std::string name, std::string whole)
    : name_(std::move(name)), whole_(std::move(whole)) {
  // RapidJSON takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != text.npos) {
    refuse(fmt::format("holds a zero byte at byte {}", zero), kRepair);
  }
  constexpr unsigned kFlags = rapidjson::kParseIterativeFlag | rapidjson::kParseValidateEncodingFlag;
  rapidjson::MemoryStream stream(text.data(), text.size());
  Overview overview;
  const rapidjson::ParseResult result =
      rapidjson::GenericReader<Text, Text, JsonMemory>().Parse<kFlags>(stream, overview);
  if (overview.problem() != nullptr) refuse(overview.problem(), kRepair);
  if (result.IsError()) {
    std::string what = rapidjson::GetParseError_En(result.Code());
    while (what.ends_with('.')) what.pop_back();  // it goes into a sentence of ours
    refuse(fmt::format("not valid JSON at byte {}: {}", result.Offset(), what), kRepair);
  }
  document_.Parse<kFlags>(text.data(), text.size());
  if (!document_.IsObject()) refuse("is not a JSON object", kRepair);
  text_ = text;
}

ConfigJson ConfigJson::load(const std::filesystem::path& directory) {
  return read(directory / "config.json", "--model wants the directory of a model",
              "--model wants a directory with config.json and model.safetensors");
}

ConfigJson ConfigJson::read(const std::filesystem::path& path, const char* wanted, const char* absent) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  const bool is_there = std::filesystem::exists(status), is_file = std::filesystem::is_regular_file(status);
  if (is_there && (!is_file || std::filesystem::file_size(path, error) > kMostBytes)) {
    throw Error(Code::kInvalidArgument,
                {.object = path.string(),
                 .happened = is_file ? fmt::format("is larger than {} bytes", kMostBytes) : "is not a regular file",
                 .errno_value = 0,
                 .hint = wanted});
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(Code::kNotFound,
                {.object = path.string(), .happened = "cannot be opened", .errno_value = errno, .hint = absent});
  }
  return {std::string(std::istreambuf_iterator<char>(file), {}), path.string()};
}

void ConfigJson::refuse(std::string happened, std::string hint) const {
  throw Error(Code::kInvalidArgument,
              {.object = name_, .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

const ConfigJson::Value* ConfigJson::find(const char* key) const {
  asked_.emplace(key);
  const auto member = document_.FindMember(key);
  return member == document_.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
}

std::uint32_t ConfigJson::size(const char* key, std::optional<std::uint32_t> otherwise, std::uint32_t most) const {
  const auto* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  if (value == nullptr) refuse(fmt::format("\"{}\" is missing", key));
  if (!value->IsUint64() || value->GetUint64() == 0) {
    refuse(fmt::format("\"{}\" is not a whole number from 1 to {}", key, most));
  }
  if (value->GetUint64() > most) refuse(fmt::format("\"{}\" is larger than {}", key, most), kNoLarger);
  return value->GetUint();
}

double ConfigJson::number(const char* key, double otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->IsNumber()) refuse(fmt::format("\"{}\" is not a number", key));
  return value->GetDouble();
}

bool ConfigJson::flag(const char* key, bool otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->IsBool()) refuse(fmt::format("\"{}\" is not true or false", key));
  return value->GetBool();
}

std::string ConfigJson::text(const char* key, std::string_view otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return std::string(otherwise);
  if (!value->IsString()) refuse(fmt::format("\"{}\" is not a string", key));
  return {value->GetString(), value->GetStringLength()};
}

const ConfigJson::Value* ConfigJson::find_list(const char* key) const {
  const auto* value = find(key);
  if (value != nullptr && !value->IsArray()) refuse(fmt::format("\"{}\" is not a list", key));
  return value;
}

std::vector<std::string> ConfigJson::texts(const char* key) const {
  std::vector<std::string> result;
  const auto* list = find_list(key);
  if (list == nullptr) return result;
  for (const Value& value : list->GetArray()) {
    if (!value.IsString()) refuse(fmt::format("\"{}\" holds something that is not a string", key));
    result.emplace_back(value.GetString(), value.GetStringLength());
  }
  return result;
}

std::vector<double> ConfigJson::numbers(const char* key) const {
  std::vector<double> result;
  const auto* list = find_list(key);
  if (list == nullptr) return result;
  for (const Value& value : list->GetArray()) {
    if (!value.IsNumber()) refuse(fmt::format("\"{}\" holds something that is not a number", key));
    result.push_back(value.GetDouble());
  }
  return result;
}

ConfigJson ConfigJson::section(const char* key) const {
  const auto* value = find(key);
  const std::string name = fmt::format("{}, \"{}\"", name_, key);
  if (value == nullptr) return {"{}", name, whole_};
  if (!value->IsObject()) refuse(fmt::format("\"{}\" is not a JSON object", key));
  rapidjson::GenericStringBuffer<Text, JsonMemory> text;
  rapidjson::Writer<decltype(text), Text, Text, JsonMemory> writer(text);
  value->Accept(writer);
  return {std::string_view(text.GetString(), text.GetSize()), name, whole_};
}

bool ConfigJson::is_list(const char* key) const {
  const auto* value = find(key);
  return value != nullptr && value->IsArray();
}

bool ConfigJson::is_text(const char* key) const {
  const auto* value = find(key);
  return value != nullptr && value->IsString();
}

bool ConfigJson::is_null(const char* key) const {
  const auto member = document_.FindMember(key);
  return member != document_.MemberEnd() && member->value.IsNull();
}

bool ConfigJson::is_off(const char* key) const {
  const auto* value = find(key);
  return value == nullptr || value->IsFalse() || (value->IsArray() && value->Empty()) ||
         (value->IsObject() && value->ObjectEmpty());
}

void ConfigJson::refuse_unread(std::span<const std::string_view> harmless) const {
  for (const std::string& key : unread()) {
    if (std::ranges::find(kOfAnyModel, key) == kOfAnyModel.end() && std::ranges::find(harmless, key) == harmless.end())
      refuse(fmt::format("\"{}\" is not known for this model_type", key),
             "Spillway might train another model without it; take it out if it changes nothing");
  }
}

std::vector<std::string> ConfigJson::unread() const {
  std::vector<std::string> keys;
  for (const auto& member : document_.GetObject()) {
    const std::string_view key(member.name.GetString(), member.name.GetStringLength());
    if (!member.value.IsNull() && !asked_.contains(key)) keys.emplace_back(key);
  }
  return keys;
}

}  // namespace spillway::models
