// The first values of a model's adapters: new ones, or those of a directory of peft's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/safetensors.h"
#include "tools/models/config_json.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

// Of peft's adapter_config.json, which must ask for nothing else. Throws kInvalidArgument.
LoraConfig read_lora(const ConfigJson& json);

class AdapterWeights {
 public:
  // A as peft begins it, uniform in ±1 / sqrt(in) (torch's kaiming_uniform_ with a = sqrt(5)), of numbers of its own; B
  // zeros. So the model begins as its base.
  AdapterWeights(const TrainedModel& model, std::uint64_t seed);
  // Those of adapter_config.json and adapter_model.safetensors, checked whole. Throws kInvalidArgument where they are
  // of another base, or are not what `lora` says, whose targets were `named` somewhere; kNotFound.
  AdapterWeights(const TrainedModel& model, const LoraConfig& lora, const std::filesystem::path& directory,
                 const char* named = "spillway.lora.targets");

  void read(std::uint32_t parameter, std::uint64_t first, std::span<float> out);

 private:
  const std::vector<Parameter> parameters_;
  std::uint64_t seed_ = 0;
  std::optional<SafetensorsReader> reader_;
  std::vector<const TensorEntry*> entries_;
};

}  // namespace spillway::models
