// What config.json says of a decoder with rotary positions and a gated MLP: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma
// 2 and Gemma 3, as transformers 5.24 reads it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/models/decoder/rotary.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

class ConfigJson;

struct DecoderConfig {
  std::string family;  // config.json's model_type
  std::uint32_t layers = 0, width = 0, inner = 0, vocabulary = 0;
  std::uint32_t positions = 0;  // that the model says it takes; 0: not said. Rotary tables go on.
  std::uint32_t heads = 0, kv_heads = 0, head_width = 0;
  bool tied = false;  // the head multiplies with the embedding

  // Which tensors a layer has.
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  bool query_norm = false;   // Qwen3, Gemma 3: norms of each head of query and key
  bool norms_after = false;  // Gemma: what attention and the MLP add is normalized before
  bool fused = false;        // Phi-3: query, key and value are one tensor, gate and up another

  struct Layer {
    std::uint32_t window = 0;  // AttentionRules
    std::uint32_t rotary = 0;  // of DecoderConfig::rotary
  };
  std::vector<Layer> layer_rules;  // of each layer

  // What is computed with them; decoder_config() only.
  float epsilon = 1e-6f;
  float norm_offset = 0;          // RmsNorm
  bool scaled_embedding = false;  // embedding_scale()
  Activation activation = Activation::kSilu;
  float attention_scale = 0, attention_soft_cap = 0;  // AttentionRules
  float head_soft_cap = 0;                            // HeadLoss
  std::vector<RotaryRules> rotary;                    // Gemma 3: of full layers, of sliding ones; others: one
  bool has_dropout = false;                           // the file asks for dropout, which is off here
  std::string text;                                   // the file, which travels with the trained model

  std::uint64_t query_width() const { return std::uint64_t{heads} * head_width; }
  std::uint64_t key_width() const { return std::uint64_t{kv_heads} * head_width; }
  // Gemma: sqrt(width). See TrainedModel::embedding_scale_in().
  float embedding_scale() const;
};

// The model_types of these, and whether it is one.
std::vector<std::string_view> decoder_families();
bool is_decoder(const std::string& family);

// Refuse (kInvalidArgument) another family, and a missing or impossible size. decoder_sizes() reads what names and
// shapes of tensors, and windows, depend on, and looks at nothing else: what a plan needs. decoder_config() reads all
// of the file, and refuses by name what it asks for and is not computed here: activations, scalings, every key that is
// neither read nor known to change nothing.
DecoderConfig decoder_sizes(const ConfigJson& json);
DecoderConfig decoder_config(const ConfigJson& json);

}  // namespace spillway::models
