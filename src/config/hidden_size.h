// The width of a model, for what "auto" stands for in a configuration.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

namespace spillway {

// Out of a Hugging Face config.json, under the names that families give it: hidden_size, n_embd (GPT-2), d_model (T5),
// the largest of hidden_sizes, or those of text_config. Nothing where none of them is a number.
std::optional<std::uint64_t> hidden_size_of(std::string_view config_json);
// Of a model's directory. Nothing, too, when there is no config.json that can be read.
std::optional<std::uint64_t> hidden_size_in(const std::filesystem::path& directory);

}  // namespace spillway
