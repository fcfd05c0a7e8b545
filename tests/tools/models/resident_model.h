// A small model on an engine that has all of it, with weights and rows that are always the same.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/tools/models/fake_engine.h"
#include "tools/models/config_json.h"
#include "tools/models/gpt2/model.h"
#include "tools/models/trainer.h"

namespace spillway::models {

inline ModelConfig tiny_model() {
  ModelConfig model;
  model.layers = 2;
  model.width = 48;
  model.heads = 3;
  model.inner = 112;
  model.positions = 80;
  model.vocabulary = 150;
  return model;
}

// Norms of heads and biases; norms after, soft caps and windows; one tensor for several products.
inline TrainedModel tiny_decoder(const char* family, const std::string& more) {
  const std::string text = std::string(R"({"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 90,
      "max_position_embeddings": 128, "model_type": ")") +
                           family + "\"" + more + "}";
  return trained_model(ConfigJson(text, family), 20);
}

inline std::vector<TrainedModel> tiny_decoders() {
  return {tiny_decoder("qwen3", R"(, "attention_bias": true, "tie_word_embeddings": true)"),
          tiny_decoder("llama", R"(, "attention_bias": true, "mlp_bias": true)"),
          tiny_decoder("gemma2", R"(, "sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
              "final_logit_softcapping": 4.0, "hidden_activation": "gelu_pytorch_tanh")"),
          tiny_decoder("phi3", R"(, "partial_rotary_factor": 0.5, "tie_word_embeddings": false)")};
}

struct Resident {
  Resident(const ModelConfig& model, const TrainerOptions& options, bool keep_insides = false)
      : Resident(trained_gpt2(model), options, keep_insides) {}
  Resident(const TrainedModel& model, const TrainerOptions& options, bool keep_insides = false)
      : trainer(model, options),
        description(trainer.description()),
        engine(description, options.type, options.threads, 0, keep_insides) {
    trainer.attach(engine);
    std::mt19937 generator(7);
    std::normal_distribution<float> normal(0, 0.2f);
    for (std::uint32_t b = 0; b < description.blocks.size(); ++b) {
      auto& block = weights.emplace_back();
      for (std::uint32_t p = 0; p < description.blocks[b].parameters.size(); ++p) {
        const auto& parameter = description.blocks[b].parameters[p];
        auto& values = block.emplace_back(elements(parameter));
        const bool norm = parameter.shape.size() == 1 && parameter.name.ends_with("weight");
        for (auto& v : values) v = normal(generator) + (norm ? 1.0f - model.norm_offset : 0.0f);
        engine.set_weight(b, p, values);
      }
    }
  }

  Trainer trainer;
  ModelDescription description;
  FakeEngine engine;
  std::vector<std::vector<std::vector<float>>> weights;
};

template <typename Model>  // ModelConfig, TrainedModel
std::vector<std::uint32_t> random_rows(const Model& model, std::size_t rows, std::size_t sequence) {
  std::mt19937 generator(11);
  std::vector<std::uint32_t> out(rows * (sequence + 1));
  for (auto& token : out) token = static_cast<std::uint32_t>(generator() % model.vocabulary);
  return out;
}

}  // namespace spillway::models
