// A new, untrained model as a model directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>

#include "tools/models/gpt2/model.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

struct Preset {
  std::string_view name;
  std::uint32_t layers, width, heads;
};
// The published sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl.
std::span<const Preset> presets();

// A standard normal number for every 64-bit counter, the same on every machine: only +, *, / and sqrt in double.
double normal_of(std::uint64_t counter);

// Writes config.json and model.safetensors; refuses a directory that holds a model. Weights as Hugging Face draws them:
// normal(0, 0.02), GPT-2's projections onto the residual stream divided by sqrt(2 * layers) (Radford et al. 2019, 2.3);
// biases 0, norms what leaves their results as they are. Returns the number of parameters; 0, with nothing left, when
// `stop` said so meanwhile.
std::uint64_t init_model(const std::filesystem::path& directory, const TrainedModel& model, std::uint64_t seed,
                         DType type, const std::function<bool()>& stop = {});
// A GPT-2, whose config.json is written for it.
std::uint64_t init_model(const std::filesystem::path& directory, ModelConfig config, std::uint64_t seed, DType type,
                         const std::function<bool()>& stop = {});

}  // namespace spillway::models
