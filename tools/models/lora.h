// Low-rank adapters (LoRA, Hu and others 2021) of a model's products, with peft's names: which products have one, and
// what peft's adapter_config.json says of them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "spillway/config.h"
#include "spillway/export.h"
#include "spillway/model.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

// visit(product, in) for every product of a layer, with the columns that it multiplies.
template <typename Layer, typename Visit>
void for_each_product(const TrainedModel& model, Layer& layer, const Visit& visit) {
  const auto query = static_cast<std::uint32_t>(model.shape(DType::kFloat32, 1, 1).query_width());
  for (auto& product : layer.qkv) visit(product, model.width);
  visit(layer.attention_out, query);
  for (auto& product : layer.mlp) visit(product, model.width);
  visit(layer.mlp_out, model.inner);
}

// Freezes the model, and adds adapters as `lora` says, as the description's last block. Throws kInvalidArgument for a
// target that is no product of a layer, in the name of what has `named` it.
void add_adapters(TrainedModel& model, const LoraConfig& lora, const std::string& named = "spillway.lora.targets");

// The description of the model without its adapters, and of the adapters alone.
ModelDescription base_of(const TrainedModel& model);
ModelDescription adapters_of(const TrainedModel& model);

// What tells adapters of the same tensors apart, as TrainedModel::facts. Of an adapter_config.json that Spillway wrote.
std::vector<std::pair<std::string, std::string>> adapter_summary(const ConfigJson& json);

}  // namespace spillway::models
