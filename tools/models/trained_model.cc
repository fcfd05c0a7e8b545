#include "tools/models/trained_model.h"

#include "tools/models/config_json.h"
#include "tools/models/decoder/model.h"
#include "tools/models/gpt2/model.h"

namespace spillway::models {

TrainedModel trained_model(const ConfigJson& json, std::uint32_t sequence) {
  if (json.text("model_type", "") == "gpt2") return trained_gpt2(model_config(json));
  return trained_decoder(decoder_config(json), sequence);
}

TrainedModel load_trained_model(const std::filesystem::path& directory, std::uint32_t sequence) {
  return trained_model(ConfigJson::load(directory), sequence);
}

}  // namespace spillway::models
