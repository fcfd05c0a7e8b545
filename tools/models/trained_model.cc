#include "tools/models/trained_model.h"

#include "spillway/bf16.h"
#include "spillway/fp16.h"
#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"
#include "tools/models/gpt2/model.h"

namespace spillway::models {

float TrainedModel::embedding_scale_in(DType type) const {
  if (type == DType::kBFloat16) return bf16_to_float(float_to_bf16(embedding_scale));
  if (type == DType::kFloat16) return fp16_to_float(float_to_fp16(embedding_scale));
  return embedding_scale;
}

std::size_t TrainedModel::rotation_values() const {
  std::size_t values = 0;
  for (const Rotation& rotation : rotations) values += rotation.table.size();
  return values;
}

TrainedModel trained_model(const ConfigJson& json, std::uint32_t sequence) {
  if (json.text("model_type", "") == "gpt2") return trained_gpt2(model_config(json));
  return trained_decoder(decoder_config(json), sequence);
}

TrainedModel load_trained_model(const std::filesystem::path& directory, std::uint32_t sequence) {
  return trained_model(ConfigJson::load(directory), sequence);
}

}  // namespace spillway::models
