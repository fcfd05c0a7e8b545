// Llama, Mistral, Qwen2 and Qwen3: a pre-norm decoder with rotary positions and a gated MLP, as Hugging Face describes
// it.
#pragma once

#include <string>

#include "tools/models/shape.h"

namespace spillway::models {

class ConfigJson;

// Whether it is a model_type of these.
bool is_decoder(const std::string& family);
// Refuses (kInvalidArgument) a missing or impossible size.
ModelShape decoder_shape(const ConfigJson& json, const std::string& family);
ModelDescription decoder_parameters(const ModelShape& shape);

}  // namespace spillway::models
