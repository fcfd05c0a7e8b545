// Random models and configurations, for tests of what is planned for them. The seed is printed.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "spillway/config.h"
#include "spillway/model.h"
#include "tests/kernels/random.h"

namespace spillway::testing {

inline Config config_for(Placement parameters, Placement states, DType type = DType::kBFloat16) {
  Config config;
  config.weights = type;
  config.parameters = parameters;
  config.states = states;
  config.tile_elements = 4096;
  if (parameters == Placement::kNvme || states == Placement::kNvme) config.nvme_paths = {"/drive"};
  return config;
}

inline constexpr std::pair<Placement, Placement> kPlacements[] = {
    {Placement::kHbm, Placement::kHbm},   {Placement::kHbm, Placement::kHost},  {Placement::kHbm, Placement::kNvme},
    {Placement::kHost, Placement::kHost}, {Placement::kHost, Placement::kNvme}, {Placement::kNvme, Placement::kHost},
    {Placement::kNvme, Placement::kNvme}};

class Random {
 public:
  Random() : generator_(seeded_generator()) {}
  std::uint64_t below(std::uint64_t end) { return generator_() % end; }
  std::mt19937_64& generator() { return generator_; }

  ModelDescription model() {
    ModelDescription model;
    for (std::uint64_t b = 0; b <= below(6); ++b) {
      Block block{.name = "h." + std::to_string(b), .parameters = {}};
      for (std::uint64_t p = 0; p <= below(4); ++p) {
        Parameter parameter{.name = block.name + "." + std::to_string(p), .shape = {1 + below(300), 1 + below(200)}};
        parameter.trainable = below(5) > 0;
        parameter.pushes = static_cast<std::uint32_t>(1 + below(3));
        block.parameters.push_back(parameter);
      }
      model.blocks.push_back(block);
    }
    model.workspace_bytes = below(100'000);
    if (below(2) == 0) {
      for (std::uint64_t v = below(20); v > 0; --v) {
        model.visits.push_back(
            {static_cast<std::uint32_t>(below(model.blocks.size())), below(2) == 0 ? Pass::kForward : Pass::kBackward});
      }
    }
    return model;
  }

  Config config() {
    const auto& [parameters, states] = kPlacements[below(std::size(kPlacements))];
    Config config = config_for(parameters, states, kDTypes[below(3)]);
    constexpr std::uint64_t kTiles[] = {1024, 3072, 16384, 4 << 20};
    if (below(2) == 0) config.gradient_clipping = 0;
    config.tile_elements = kTiles[below(4)];
    if (below(3) == 0) config.commit_every = static_cast<std::uint32_t>(below(3));
    if (below(3) == 0) config.nvme_paths = {"/drive"};
    for (const auto knob :
         {&DeepSpeedKnobs::max_live_parameters, &DeepSpeedKnobs::max_reuse_distance,
          &DeepSpeedKnobs::param_persistence_threshold, &DeepSpeedKnobs::model_persistence_threshold,
          &DeepSpeedKnobs::max_in_cpu, &DeepSpeedKnobs::optimizer_buffer_count, &DeepSpeedKnobs::param_buffer_size}) {
      if (below(8) == 0) config.knobs.*knob = 1 + below(100'000);
    }
    for (const auto knob : {&DeepSpeedKnobs::pipeline_read, &DeepSpeedKnobs::pipeline_write}) {
      if (below(8) == 0) config.knobs.*knob = below(2) == 0;
    }
    return config;
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace spillway::testing
