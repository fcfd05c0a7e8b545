#include "tools/models/adapter_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <unordered_set>

#include "spillway/error.h"
#include "tools/models/lora.h"
#include "tools/models/splitmix.h"

namespace spillway::models {
namespace {

// Ways to begin an adapter, as init_lora_weights, that leave the base as it is.
constexpr std::array<std::string_view, 3> kKeepTheBase = {"gaussian", "orthogonal", "eva"};
// Where it comes from, how it was begun and trained, and what is checked where it is of weight.
constexpr auto kOfNoWeight = std::to_array<std::string_view>({
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
});
constexpr const char* kWhole = "name a directory that peft's save_pretrained() has written";

std::vector<Parameter> parameters_of(const TrainedModel& model) {
  return model.description.blocks[model.adapters->block].parameters;
}

// What it asks for beside A, B and alpha / r is computed otherwise, or not at all.
void check_kind(const ConfigJson& json) {
  if (const std::string kind = json.text("peft_type", ""); kind != "LORA")
    json.refuse(fmt::format("\"peft_type\" is \"{}\"", kind), "LORA alone is computed");
  for (const char* key : {"use_rslora", "use_dora", "use_qalora", "lora_bias"}) {
    if (json.flag(key, false)) json.refuse(fmt::format("\"{}\" is true", key), "LoRA alone is computed");
  }
  if (const std::string bias = json.text("bias", "none"); bias != "none")
    json.refuse(fmt::format("\"bias\" is \"{}\"", bias), "adapters alone are computed");
  for (const char* key : {"modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices"}) {
    if (json.has(key)) json.refuse(fmt::format("\"{}\" is set", key), "adapters of products alone are computed");
  }
  for (const char* key : {"rank_pattern", "alpha_pattern"}) {
    if (!json.section(key).unread().empty())
      json.refuse(fmt::format("\"{}\" has entries", key), "all adapters have one rank and one alpha here");
  }
  if (json.is_text("init_lora_weights")) {
    const std::string how = json.text("init_lora_weights", "");
    if (std::ranges::find(kKeepTheBase, how) == kKeepTheBase.end()) {
      json.refuse(fmt::format("\"init_lora_weights\" is \"{}\", which may have changed the base", how),
                  "save it as a plain adapter: peft's save_pretrained() with path_initial_model_for_weight_conversion");
    }
  }
  for (const std::string& key : json.unread()) {
    if (std::ranges::find(kOfNoWeight, key) == kOfNoWeight.end() && !json.is_off(key.c_str()))
      json.refuse(fmt::format("\"{}\" is set", key), "it may ask for more than plain LoRA; take it out if it does not");
  }
}

void check_config(const ConfigJson& json, const LoraConfig& lora) {
  check_kind(json);
  if (const std::uint32_t rank = json.size("r", 8); rank != lora.rank)
    json.refuse(fmt::format("\"r\" is {}, and spillway.lora.rank is {}", rank, lora.rank), "say the same in both");
  if (const double alpha = json.number("lora_alpha", 8); alpha != lora.alpha)
    json.refuse(fmt::format("\"lora_alpha\" is {}, and spillway.lora.alpha is {}", alpha, lora.alpha),
                "say the same in both");
}

[[noreturn]] void refuse(const std::filesystem::path& file, std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument,
              {.object = file.string(), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

}  // namespace

LoraConfig read_lora(const ConfigJson& json) {
  check_kind(json);
  for (const char* key : {"layers_to_transform", "layers_pattern", "exclude_modules"}) {
    if (json.has(key)) json.refuse(fmt::format("\"{}\" is set", key), "products are chosen by target_modules alone");
  }
  LoraConfig lora{.rank = json.size("r", 8), .alpha = json.number("lora_alpha", 8)};
  if (!json.is_text("target_modules"))
    lora.targets = json.texts("target_modules");
  else if (lora.targets = {json.text("target_modules", "")}; lora.targets[0] != "all-linear")
    json.refuse("\"target_modules\" is a pattern", "save the adapter with a list of names");
  if (lora.targets.empty()) json.refuse("\"target_modules\" names none", kWhole);
  return lora;
}

AdapterWeights::AdapterWeights(const TrainedModel& model, std::uint64_t seed)
    : parameters_(parameters_of(model)), seed_(seed) {}

AdapterWeights::AdapterWeights(const TrainedModel& model, const LoraConfig& lora,
                               const std::filesystem::path& directory, const char* named)
    : parameters_(parameters_of(model)) {
  const std::filesystem::path config = directory / kAdapterConfig;
  check_config(ConfigJson::read(config, kWhole, kWhole), lora);
  reader_ = SafetensorsReader::open(directory, kAdapterStem);
  const std::filesystem::path file = directory / fmt::format("{}.safetensors", kAdapterStem);
  std::unordered_set<const TensorEntry*> used;
  for (const Parameter& parameter : parameters_) {
    const TensorEntry* entry = reader_->find(parameter.name);
    if (entry == nullptr) {
      refuse(file, fmt::format("tensor {} is missing", parameter.name),
             fmt::format("take the adapter's own targets in {}, and the base that it is of", named));
    }
    if (entry->shape != parameter.shape) {
      refuse(file,
             fmt::format("tensor {} has shape [{}], this model's adapter has [{}]", entry->name,
                         fmt::join(entry->shape, ", "), fmt::join(parameter.shape, ", ")),
             "take the base that the adapter is of");
    }
    if (!entry->type)
      refuse(file, fmt::format("tensor {} is of type {}", entry->name, entry->dtype), "F32, BF16 and F16 are read");
    entries_.push_back(entry);
    used.insert(entry);
  }
  for (const TensorEntry& entry : reader_->tensors()) {
    if (!used.contains(&entry)) {
      refuse(file, fmt::format("tensor {} is of no adapter that {} asks for", entry.name, named),
             "take the adapter's own targets, and the base that it is of");
    }
  }
  std::vector<float> values(64 * 1024);
  for (const TensorEntry* entry : entries_) {
    for (std::uint64_t at = 0; at < entry->elements; at += values.size()) {
      const auto piece = std::span(values).first(std::min<std::uint64_t>(values.size(), entry->elements - at));
      reader_->read(*entry, at, piece);
      if (!std::ranges::all_of(piece, [](float value) { return std::isfinite(value); })) {
        refuse(file, fmt::format("tensor {} holds values that are not finite", entry->name),
               "the file is damaged, or what made it failed: take another one");
      }
    }
  }
}

void AdapterWeights::read(std::uint32_t parameter, std::uint64_t first, std::span<float> out) {
  if (reader_) return reader_->read(*entries_[parameter], first, out);
  const bool is_up = parameter % 2 == 1;
  if (is_up) {
    std::ranges::fill(out, 0.0f);
    return;
  }
  const double bound = 1 / std::sqrt(static_cast<double>(parameters_[parameter].shape[1]));
  // Every tensor counts from a place of its own, as those of new models do.
  const std::uint64_t origin = mix(seed_) ^ mix(~std::uint64_t{parameter});
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double p = (static_cast<double>(mix(origin + first + i) >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
    out[i] = static_cast<float>((2 * p - 1) * bound);
  }
}

}  // namespace spillway::models
