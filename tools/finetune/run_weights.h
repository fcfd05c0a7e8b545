// The weights that a run begins with, and those that it trained: of all of the model, or of its adapters alone.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "tools/finetune/ranks.h"
#include "tools/models/adapter_weights.h"
#include "tools/models/trained_model.h"
#include "tools/models/weights.h"

namespace spillway::models::finetune {

class FirstWeights {
 public:
  // Of the model's directory, checked whole. `adapter`: of peft's; empty: new adapters, where the model has some.
  FirstWeights(const TrainedModel& model, const std::filesystem::path& directory, const std::filesystem::path& adapter,
               const Config& config);
  // For Engine::import_weights; refers to this object.
  WeightSource source();

 private:
  ModelWeights base_;
  std::uint32_t adapter_block_ = 0;
  std::optional<AdapterWeights> adapters_;
};

// What is written of a model.
ModelDescription output_of(const TrainedModel& model);
// Writes it to `out`. All ranks give their parts, and the first one writes. `base`: what adapters are of.
void write_output(Engine& engine, Ranks& ranks, const TrainedModel& model, const ModelDescription& output,
                  const std::filesystem::path& out, const std::filesystem::path& base);
// `trained model: DIR`, and what loads it.
std::string told_of_output(const TrainedModel& model, const std::filesystem::path& out);

}  // namespace spillway::models::finetune
