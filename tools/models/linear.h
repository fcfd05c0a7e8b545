// Parameters as families name them in their descriptions, and what all check of a shape.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "spillway/model.h"
#include "tools/models/config_json.h"

namespace spillway::models {

inline Parameter tensor(std::string name, std::vector<std::uint64_t> shape) {
  return {.name = std::move(name), .shape = std::move(shape)};
}

// torch.nn.Linear's.
inline void add_linear(Block& block, const std::string& name, std::uint64_t in, std::uint64_t out, bool bias) {
  block.parameters.push_back(tensor(name + ".weight", {out, in}));
  if (bias) block.parameters.push_back(tensor(name + ".bias", {out}));
}

// What the heads take together is a size like the others.
void check_heads(const ConfigJson& json, std::uint32_t heads, std::uint32_t head_width);

}  // namespace spillway::models
