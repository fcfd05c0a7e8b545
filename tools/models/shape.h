// The shapes of the model families that are trained or planned for, from the facts in Hugging Face's config.json alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "spillway/model.h"
#include "tools/models/decoder/config.h"
#include "tools/models/gpt2/model.h"

namespace spillway::models {

struct ModelShape {
  std::string family;                            // config.json's model_type
  std::uint32_t layers = 0, decoder_layers = 0;  // decoder_layers: of T5, after its `layers` of the encoder
  std::uint32_t width = 0, inner = 0, vocabulary = 0, positions = 0;  // positions 0: any number
  std::uint32_t heads = 0, kv_heads = 0, head_width = 0;
  std::uint32_t window = 0;   // tokens that attention of every layer looks back; 0: all
  std::uint32_t buckets = 0;  // T5: of relative positions
  bool tied = false;          // the head multiplies with the embedding
  bool gated = true;          // the MLP's first product has a gate beside it
  std::optional<ModelConfig> gpt2 = {};
  std::optional<DecoderConfig> decoder = {};  // of decoder_sizes(): which tensors there are

  std::string text = {}, name = {};  // config.json, and how errors call it

  bool trained() const { return gpt2 || decoder; }  // by `spillway finetune`, if trained_model() takes all of it
  bool encodes() const { return decoder_layers > 0; }
  std::uint64_t query_width() const { return std::uint64_t{heads} * head_width; }
  std::uint64_t key_width() const { return std::uint64_t{kv_heads} * head_width; }
};

// `name` stands in errors (kInvalidArgument): another family, a missing or impossible size.
ModelShape parse_shape(std::string_view text, const std::string& name);
ModelShape load_shape(const std::filesystem::path& directory);

// A GPT-2 of about so many parameters, 1e6 to 1e13, as deep and wide as published models of that size are, with room
// for rows of `sequence` tokens.
ModelShape shape_of_size(double parameters, std::uint32_t sequence);

// Tensors of the blocks as Hugging Face names them; no activations, insides or working memory. Blocks: the embedding,
// the layers (of T5 those of the encoder, then those of the decoder), and, unless it is tied to the embedding, the head
// with the final norm.
ModelDescription describe_parameters(const ModelShape& shape);

}  // namespace spillway::models
