// A small model on an engine that has all of it, with weights and rows that are always the same.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tests/tools/models/fake_engine.h"
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
