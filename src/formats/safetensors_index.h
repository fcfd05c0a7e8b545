// The index of a model that lies in several safetensors files, checked as if written by an enemy.
//
//   {"metadata": …, "weight_map": {"wte.weight": "model-00001-of-00002.safetensors", …}}
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace spillway {

// Tensor name -> name of a file in the index's own directory. Throws kInvalidArgument: `path`, tensor, fault.
std::map<std::string, std::string> parse_safetensors_index(const std::string& path, std::string_view text);

}  // namespace spillway
