// The header of a safetensors file, and the index of a model that lies in several of them, checked as if written by an
// enemy.
//
//   8 bytes   length N of the header, little-endian
//   N bytes   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {"k": "v"}}
//   the rest  data; offsets count from its start, tensors cover it without gap or overlap
//
//   the index {"metadata": …, "weight_map": {"wte.weight": "model-00001-of-00002.safetensors", …}}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/safetensors.h"

namespace spillway {

inline constexpr std::uint64_t kMostHeaderBytes = 100'000'000;  // the limit of the format's own library

// The tensors of a header; offsets are made absolute by adding `data_start`, where the data begins, and `file` is
// stored in each. `data_bytes` is what the file has after the header. Throws kInvalidArgument: `path`, tensor, fault.
std::vector<TensorEntry> parse_safetensors_header(const std::string& path, std::string_view header, std::uint32_t file,
                                                  std::uint64_t data_start, std::uint64_t data_bytes);

// Tensor name -> name of a file in the index's own directory. Throws kInvalidArgument: `path`, tensor, fault.
std::map<std::string, std::string> parse_safetensors_index(const std::string& path, std::string_view text);

// A name from a file for a message: UTF-8 whatever it was, cut when long, without control characters.
std::string printable(std::string_view name);

}  // namespace spillway
