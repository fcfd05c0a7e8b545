#include "tools/models/lora.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "spillway/error.h"
#include "tools/models/config_json.h"
#include "tools/models/linear.h"

namespace spillway::models {
namespace {

constexpr std::string_view kAllLinear = "all-linear", kPrefix = "base_model.model.", kWeight = ".weight";

// peft's rule: a module's whole name, or its end after a dot.
bool matches(std::string_view target, std::string_view module) {
  return module == target ||
         (module.ends_with(target) && module.substr(0, module.size() - target.size()).ends_with('.'));
}

std::string_view module_of(const Parameter& weight) {
  std::string_view name = weight.name;
  name.remove_suffix(kWeight.size());
  return name;
}

std::string_view leaf_of(std::string_view module) { return module.substr(module.rfind('.') + 1); }

// The last parts of the names of all products of a layer.
std::vector<std::string> product_names(const TrainedModel& model) {
  std::vector<std::string> names;
  const Block& block = model.description.blocks[layer_block(0)];
  for_each_product(model, model.layers[0], [&](const ProductTensors& product, std::uint32_t) {
    const std::string name(leaf_of(module_of(block.parameters[product.weight])));
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  });
  return names;
}

std::string json_text(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      result += c;
  }
  return result + '"';
}

// Without the base's path, which an export is told: a run may go on with its model moved.
std::string config_text(const TrainedModel& model, const LoraConfig& lora, const std::vector<std::string>& targets) {
  std::vector<std::string> names;
  for (const std::string& target : targets) names.push_back(json_text(target));
  return fmt::format(R"({{
  "alpha_pattern": {{}},
  "base_model_name_or_path": null,
  "bias": "none",
  "fan_in_fan_out": {transposed},
  "inference_mode": true,
  "init_lora_weights": true,
  "lora_alpha": {alpha},
  "lora_dropout": 0.0,
  "modules_to_save": null,
  "peft_type": "LORA",
  "r": {rank},
  "rank_pattern": {{}},
  "target_modules": [{targets}],
  "task_type": "CAUSAL_LM",
  "use_dora": false,
  "use_rslora": false
}}
)",
                     fmt::arg("transposed", model.layout == Layout::kInOut), fmt::arg("alpha", lora.alpha),
                     fmt::arg("rank", lora.rank), fmt::arg("targets", fmt::join(names, ", ")));
}

// Which products have an adapter.
class Choice {
 public:
  explicit Choice(const std::vector<std::string>& targets) : targets_(targets), found_(targets.size()) {}

  bool takes(std::string_view module) {
    bool any = false;
    for (std::size_t t = 0; t < targets_.size(); ++t) {
      if (targets_[t] != kAllLinear && !matches(targets_[t], module)) continue;
      any = found_[t] = true;
    }
    return any;
  }
  void refuse_unmatched(const std::string& named, const std::vector<std::string>& names) const {
    for (std::size_t t = 0; t < targets_.size(); ++t) {
      if (found_[t]) continue;
      throw Error(Code::kInvalidArgument, {named, fmt::format("\"{}\" matches no product of a layer", targets_[t]), 0,
                                           fmt::format("this model's are {}", fmt::join(names, ", "))});
    }
  }

 private:
  const std::vector<std::string>& targets_;
  std::vector<bool> found_;
};

// The adapters' block is there from the first layer of a pass to its last: it is visited after the embedding, and
// after the head. Nothing below the lowest layer with an adapter is trained, so that nothing goes back below it.
std::vector<Visit> visits_with(std::vector<Visit> visits, std::uint32_t adapters, std::uint32_t lowest) {
  visits.resize(visits.size() - 1 - lowest);  // the embedding's, and those of layers
  const auto head = std::ranges::find(visits, Pass::kBackward, &Visit::pass);
  visits.insert(head + 1, {adapters, Pass::kBackward});
  visits.insert(visits.begin() + 1, {adapters, Pass::kForward});
  return visits;
}

}  // namespace

void add_adapters(TrainedModel& model, const LoraConfig& lora, const std::string& named) {
  ModelDescription& description = model.description;
  const std::vector<std::string> names = product_names(model);
  Block adapters{.name = "adapters", .parameters = {}, .held = true};
  Choice choice(lora.targets);
  std::optional<std::uint32_t> lowest;
  for (std::uint32_t l = 0; l < model.layers.size(); ++l) {
    const Block& block = description.blocks[layer_block(l)];
    for_each_product(model, model.layers[l], [&](ProductTensors& product, std::uint32_t in) {
      const std::string_view module = module_of(block.parameters[product.weight]);
      if (!choice.takes(module)) return;
      if (!lowest) lowest = l;
      const auto first = static_cast<ParameterIndex>(adapters.parameters.size());
      product.adapter = {.down = first, .up = first + 1};
      adapters.parameters.push_back(tensor(fmt::format("{}{}.lora_A.weight", kPrefix, module), {lora.rank, in}));
      adapters.parameters.push_back(
          tensor(fmt::format("{}{}.lora_B.weight", kPrefix, module), {product.out, lora.rank}));
    });
  }
  choice.refuse_unmatched(named, names);
  for (Block& block : description.blocks) {
    for (Parameter& parameter : block.parameters) parameter.trainable = false;
  }
  model.adapters = TrainedAdapters{.block = static_cast<std::uint32_t>(description.blocks.size()),
                                   .rank = lora.rank,
                                   .scale = static_cast<float>(lora.alpha / lora.rank),
                                   .lowest = lowest.value_or(0)};
  description.blocks.push_back(std::move(adapters));
  description.visits = visits_with(description.visits, model.adapters->block, model.adapters->lowest);
  const bool all = std::ranges::find(lora.targets, kAllLinear) != lora.targets.end();
  const std::string text = config_text(model, lora, all ? names : lora.targets);
  description.attachments.push_back({.name = kAdapterConfig, .text = text});
  for (auto& fact : adapter_summary(ConfigJson(text, kAdapterConfig))) model.facts.push_back(std::move(fact));
}

ModelDescription base_of(const TrainedModel& model) {
  ModelDescription base = model.description;
  if (model.adapters) base.blocks.erase(base.blocks.begin() + model.adapters->block);
  std::erase_if(base.attachments, [](const Attachment& file) { return file.name == kAdapterConfig; });
  return base;
}

ModelDescription adapters_of(const TrainedModel& model) {
  ModelDescription adapters;
  adapters.blocks.push_back(model.description.blocks[model.adapters->block]);
  for (const Attachment& file : model.description.attachments) {
    if (file.name == kAdapterConfig) adapters.attachments.push_back(file);
  }
  return adapters;
}

std::vector<std::pair<std::string, std::string>> adapter_summary(const ConfigJson& json) {
  return {{"LoRA of rank", fmt::format("{}", json.size("r", 8))},
          {"lora_alpha", fmt::format("{}", json.number("lora_alpha", 8))}};
}

}  // namespace spillway::models
