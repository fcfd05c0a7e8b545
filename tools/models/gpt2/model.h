// The GPT-2 family (Radford et al. 2019) as Hugging Face describes it: config.json in, a description for the engine
// out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/model.h"
#include "tools/models/trained_model.h"

namespace spillway::models {

class ConfigJson;

inline constexpr std::uint32_t kMostLayers = 1u << 14;

struct ModelConfig {
  std::uint32_t layers = 0, width = 0, heads = 0, inner = 0;
  std::uint32_t positions = 1024, vocabulary = 50257;
  float epsilon = 1e-5f;
  bool has_dropout = false;  // the file asks for dropout, which is off here
  std::string text;          // the file, which travels with the trained model
};

// `name` stands in errors. Refuses (kInvalidArgument) what this program does not compute: other architectures and
// activations, untied embeddings, sizes that do not fit together.
ModelConfig model_config(const ConfigJson& json);
ModelConfig parse_model_config(std::string_view text, const std::string& name);
ModelConfig load_model_config(const std::filesystem::path& directory);
// The text of a config.json that GPT2LMHeadModel.from_pretrained reads.
std::string model_config_text(const ModelConfig& config, DType stored);

// Blocks of the description: the tied embedding, then the layers. Parameters in their blocks:
enum EmbeddingParameter : std::uint32_t { kTokenWeight, kPositionWeight, kFinalNormWeight, kFinalNormBias };
enum LayerParameter : std::uint32_t {
  kNorm1Weight,
  kNorm1Bias,
  kAttentionWeight,
  kAttentionBias,
  kAttentionOutWeight,
  kAttentionOutBias,
  kNorm2Weight,
  kNorm2Bias,
  kMlpWeight,
  kMlpBias,
  kMlpOutWeight,
  kMlpOutBias,
  kLayerParameters
};

// Every parameter is pushed once a step: micro-batches are summed inside the model. Visits: embedding and layers
// forward; the head (forward, loss and backward in one, on the embedding); layers backward; embedding backward.
ModelDescription describe_model(const ModelConfig& config, std::uint64_t workspace_bytes);
std::uint64_t elements(const Parameter& parameter);

TrainedModel trained_gpt2(const ModelConfig& config);

}  // namespace spillway::models
