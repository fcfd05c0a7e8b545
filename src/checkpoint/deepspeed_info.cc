#include "src/checkpoint/deepspeed_info.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <string_view>

#include "spillway/error.h"
#include "src/formats/refuse.h"
#include "src/formats/safetensors_header.h"

namespace spillway {
namespace {

using Kind = PickleValue::Kind;

// What the engine itself saves; everything else came from the program (engine.py, _common_checkpoint_state).
constexpr auto kEngineKeys = std::to_array<std::string_view>({"module",
                                                              "buffer_names",
                                                              "optimizer",
                                                              "param_shapes",
                                                              "shared_params",
                                                              "lr_scheduler",
                                                              "data_sampler",
                                                              "frozen_param_shapes",
                                                              "random_ltd",
                                                              "skipped_steps",
                                                              "global_steps",
                                                              "frozen_param_fragments",
                                                              "global_samples",
                                                              "dp_world_size",
                                                              "mp_world_size",
                                                              "sparse_tensor_module_names",
                                                              "ds_config",
                                                              "ds_version",
                                                              "num_experts",
                                                              "checkpoint_parallel_dimensions",
                                                              "csr_tensor_module_names",
                                                              "universal_checkpoint_info"});

bool is_true(const PickleValue* value) { return value && value->is(Kind::kBool) && value->integer == 1; }

const PickleValue* section(const PickleValue& config, std::string_view name) {
  const PickleValue* found = config.find(name);
  return found && found->is(Kind::kDict) ? found : nullptr;
}

// DeepSpeed's own configuration, where the engine was given one as a dict.
void add_config_info(const PickleValue& config, const std::string& object, DeepSpeedInfo& facts) {
  const auto enabled = [&](std::string_view name) {
    const PickleValue* found = section(config, name);
    return found && is_true(found->find("enabled"));
  };
  if (enabled("fp16")) {
    facts.weights = DType::kFloat16;
  } else if (enabled("bf16") || enabled("bfloat16")) {
    facts.weights = DType::kBFloat16;
  } else if (config.is(Kind::kDict) && !facts.weights) {
    facts.weights = DType::kFloat32;
  }
  const PickleValue* optimizer = section(config, "optimizer");
  const PickleValue* type = optimizer ? optimizer->find("type") : nullptr;
  if (!type || !type->is(Kind::kText)) return;
  std::string name(type->text);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name == "adam" || name == "adamw") return;
  refuse(object, fmt::format("was trained with optimizer {}", printable(type->text)),
         "Adam's and AdamW's states are imported; with others, begin with the weights (zero_to_fp32.py) alone");
}

// A LossScaler's members or a DynamicLossScaler's (deepspeed/runtime/fp16/loss_scaler.py), which counts iterations from
// 0, and has the last overflow, before the first one, at -1. Nothing for what they cannot be.
std::optional<DeepSpeedLossScale> loss_scale(const PickleValue& members) {
  const std::optional<double> scale = real_number(members.find("cur_scale"));
  if (!scale || !std::isfinite(*scale) || *scale <= 0) return std::nullopt;
  if (!is_true(members.find("dynamic"))) return DeepSpeedLossScale{.scale = *scale};
  const auto iteration = whole_number(members.find("cur_iter"));
  const auto hysteresis = whole_number(members.find("cur_hysteresis"));
  const PickleValue* overflow = members.find("last_overflow_iter");
  if (!iteration || *iteration > kMostSteps || !hysteresis || *hysteresis < 1 || *hysteresis > UINT32_MAX ||
      !overflow || !overflow->is(Kind::kInteger) || overflow->integer < -1 ||
      overflow->integer >= static_cast<std::int64_t>(*iteration)) {
    return std::nullopt;
  }
  return DeepSpeedLossScale{.scale = *scale,
                            .clean = *iteration - static_cast<std::uint64_t>(overflow->integer + 1),
                            .hysteresis = static_cast<std::uint32_t>(*hysteresis)};
}

}  // namespace

std::optional<std::uint64_t> whole_number(const PickleValue* value) {
  if (!value) return std::nullopt;
  if (value->is(Kind::kObject) && value->items[1]->items.size() == 1) value = value->items[1]->items[0];
  return value->unsigned_integer();
}

std::optional<double> real_number(const PickleValue* value) {
  if (value && value->is(Kind::kFloat)) return value->number;
  if (value && value->is(Kind::kInteger)) return static_cast<double>(value->integer);
  return std::nullopt;
}

const PickleValue& member(const PickleValue& dict, std::string_view key, Kind kind, const std::string& object) {
  const PickleValue* found = dict.find(key);
  if (found && found->is(kind)) return *found;
  refuse(object, fmt::format("has no `{}`, or not as DeepSpeed writes it", key),
         "name a checkpoint that DeepSpeed's save_checkpoint() wrote with ZeRO");
}

void add_engine_info(const PickleValue& root, const std::string& object, DeepSpeedInfo& facts) {
  if (whole_number(root.find("mp_world_size")).value_or(1) > 1)
    refuse(object, "is of a tensor-parallel run", "only checkpoints of data-parallel runs are imported");
  for (const char* key : {"ds_autoep_layers", "autoep_layers"}) {
    if (root.find(key)) refuse(object, "holds experts of a mixture", "only dense models are imported");
  }
  if (const PickleValue* config = root.find("ds_config")) add_config_info(*config, object, facts);
  if (const PickleValue* version = root.find("ds_version"); version && version->is(Kind::kText))
    facts.version = printable(version->text);
  facts.global_steps = whole_number(root.find("global_steps")).value_or(0);
  facts.skipped_steps = whole_number(root.find("skipped_steps")).value_or(0);
  if (facts.global_steps > kMostSteps || facts.skipped_steps > kMostSteps)
    refuse(object, fmt::format("counts {} steps, {} of them skipped", facts.global_steps, facts.skipped_steps),
           "copy the checkpoint again");
  facts.samples = whole_number(root.find("global_samples")).value_or(0);
  if (const PickleValue* schedule = root.find("lr_scheduler")) {
    // DeepSpeed's count from -1, before the first step; PyTorch's from 0.
    const PickleValue* last = schedule->find("last_batch_iteration");
    if (last && last->is(Kind::kInteger) && last->integer >= -1)
      facts.schedule_steps = static_cast<std::uint64_t>(last->integer + 1);
    else
      facts.schedule_steps = whole_number(schedule->find("last_epoch"));
  }
  for (std::size_t i = 0; root.is(Kind::kDict) && i < root.items.size(); i += 2) {
    const PickleValue& key = *root.items[i];
    if (key.is(Kind::kText) && std::ranges::find(kEngineKeys, key.text) == kEngineKeys.end())
      facts.client_state.push_back(printable(key.text));
  }
}

void add_optimizer_info(const PickleValue& zero, const PickleValue& base, DeepSpeedInfo& facts) {
  // Whatever the type that was trained; of fp16 alone it says something.
  const PickleValue* scaler = zero.find("loss_scaler");
  if (facts.weights == DType::kFloat16 && scaler && scaler->is(Kind::kObject))
    facts.loss_scale = loss_scale(*scaler->items[2]);
  const PickleValue* groups = base.find("param_groups");
  if (!groups || !groups->is(Kind::kList)) return;
  for (const PickleValue* group : groups->items) {
    DeepSpeedGroup& info_of = facts.groups.emplace_back();
    info_of.learning_rate = real_number(group->find("lr"));
    info_of.epsilon = real_number(group->find("eps"));
    info_of.weight_decay = real_number(group->find("weight_decay"));
    const PickleValue* betas = group->find("betas");
    if (!betas || !(betas->is(Kind::kTuple) || betas->is(Kind::kList)) || betas->items.size() != 2) continue;
    info_of.beta1 = real_number(betas->items[0]);
    info_of.beta2 = real_number(betas->items[1]);
  }
}

}  // namespace spillway
