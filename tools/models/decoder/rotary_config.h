// Rotary positions as config.json says them: in transformers 5's rope_parameters, or in the keys before it.
#pragma once

#include <vector>

#include "tools/models/decoder/config.h"

namespace spillway::models {

// Of DecoderConfig::rotary, for a model whose sizes are known. Refuses (kInvalidArgument) what it does not compute.
std::vector<RotaryRules> read_rotary(const ConfigJson& json, const DecoderConfig& model);

}  // namespace spillway::models
