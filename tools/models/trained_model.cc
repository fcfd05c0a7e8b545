#include "tools/models/trained_model.h"

#include <fmt/format.h>

#include "spillway/bf16.h"
#include "spillway/error.h"
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

void check_row(const TrainedModel& model, std::uint32_t sequence) {
  if (sequence <= model.longest_row()) return;
  throw Error(Code::kInvalidArgument,
              {.object = "--seq",
               .happened = fmt::format("{} tokens are more than the model's {} positions", sequence, model.positions),
               .errno_value = 0,
               .hint = fmt::format("use --seq {} or less", model.positions)});
}

TrainedModel trained_model(const ConfigJson& json, std::uint32_t sequence) {
  if (json.text("model_type", "") == "gpt2") return trained_gpt2(model_config(json));
  return trained_decoder(decoder_config(json), sequence);
}

TrainedModel load_trained_model(const std::filesystem::path& directory, std::uint32_t sequence) {
  return trained_model(ConfigJson::load(directory), sequence);
}

}  // namespace spillway::models
