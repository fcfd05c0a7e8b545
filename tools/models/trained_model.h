// What a trainer computes of a model, for any family: made of config.json by the family's folder, read by the trainer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spillway/model.h"
#include "tools/models/ops/ops.h"

namespace spillway::models {

class ConfigJson;

// Parameters by their index in their block.
using ParameterIndex = std::uint32_t;

struct NormTensors {
  ParameterIndex weight = 0;
  std::optional<ParameterIndex> bias = {};  // a layer norm has one, an RMS norm none
};

// What a low-rank adapter adds to a product: scale * up (down x). Parameters of TrainedAdapters::block.
struct AdapterTensors {
  ParameterIndex down = 0, up = 0;  // [rank][in], [out][rank]
};

struct ProductTensors {
  ParameterIndex weight = 0;
  std::optional<ParameterIndex> bias = {};
  std::uint32_t out = 0;  // columns of the result
  std::optional<AdapterTensors> adapter = {};
};

// A layer: x + attention(norm(x)), and then middle + mlp(norm(middle)).
struct TrainedLayer {
  NormTensors attention_norm, mlp_norm;
  std::optional<NormTensors> attention_after = {}, mlp_after = {};  // norms of what is added; Gemma
  std::vector<ProductTensors> qkv;                                  // results side by side: [query | key | value]
  std::optional<ParameterIndex> query_norm = {}, key_norm = {};     // both or none
  ProductTensors attention_out;
  std::vector<ProductTensors> mlp;  // results side by side: gate and up, or what the activation is computed of
  ProductTensors mlp_out;
  std::uint32_t window = 0;                    // AttentionRules
  std::optional<std::uint32_t> rotation = {};  // of TrainedModel::rotations
};

// Cosine and sine of positions 0, 1, …: Rotary::table.
struct Rotation {
  std::uint32_t rotated = 0;
  std::vector<float> table;  // [positions][rotated / 2][2], for as many positions as a row has tokens
};

// Adapters of products of the layers: one block, leased for as long as a pass lasts.
struct TrainedAdapters {
  std::uint32_t block = 0, rank = 0;
  float scale = 1;
  std::uint32_t lowest = 0;  // layer that has one; nothing goes back below it
};

struct TrainedModel {
  // Blocks: the embedding, the layers, and a head where it is not tied to the embedding; after them the adapters,
  // where there are some. Every parameter is trained, or those of the adapters alone.
  ModelDescription description;  // without working memory, activations and insides
  std::uint32_t head_block = 0;  // 0: the head multiplies with the embedding
  ParameterIndex token_weight = 0, head_weight = 0;
  std::optional<ParameterIndex> position_weight = {};
  NormTensors final_norm;  // in the head's block
  std::vector<TrainedLayer> layers;
  std::optional<TrainedAdapters> adapters = {};  // lora.h

  std::uint32_t width = 0, heads = 0, inner = 0, vocabulary = 0;
  std::uint32_t positions = 0;                 // config.json's; rotary ones go on after them
  std::uint32_t key_heads = 0, head_size = 0;  // Shape's
  float epsilon = 1e-5f;
  Layout layout = Layout::kInOut;
  bool rms = false;  // norms are RMS norms
  float norm_offset = 0;
  std::optional<Activation> gate = {};  // none: gelu with tanh, of one product
  float embedding_scale = 1, attention_scale = 0, attention_soft_cap = 0, head_soft_cap = 0;
  std::vector<Rotation> rotations = {};  // filled in for the rows' tokens

  std::string family;
  bool has_dropout = false;  // the file asks for dropout, which is off here
  // Keys of config.json that no tensor's shape shows, with their values: two models that differ there are not the same.
  std::vector<std::pair<std::string, std::string>> facts = {};

  // As transformers multiplies with it: rounded to the type of the weights. In bf16 the 55.43 of width 3,072 is 55.5.
  float embedding_scale_in(DType type) const;
  std::size_t rotation_values() const;  // floats of all tables
  // In tokens, at the most.
  std::uint32_t longest_row() const { return position_weight ? positions : UINT32_MAX; }

  Shape shape(DType type, std::uint32_t batch, std::uint32_t sequence) const {
    return {.type = type,
            .batch = batch,
            .sequence = sequence,
            .width = width,
            .heads = heads,
            .inner = inner,
            .vocabulary = vocabulary,
            .positions = positions,
            .epsilon = epsilon,
            .key_heads = key_heads,
            .head_size = head_size,
            .adapter_rank = adapters ? adapters->rank : 0};
  }
};

// Refuses (kInvalidArgument, --seq) rows that the model has no positions for.
void check_row(const TrainedModel& model, std::uint32_t sequence);

// For rows of `sequence` tokens. Refuses (kInvalidArgument) what this program does not compute.
TrainedModel trained_model(const ConfigJson& json, std::uint32_t sequence);
TrainedModel load_trained_model(const std::filesystem::path& directory, std::uint32_t sequence);

constexpr std::uint32_t kEmbeddingBlock = 0;
constexpr std::uint32_t layer_block(std::uint32_t layer) { return 1 + layer; }

}  // namespace spillway::models
