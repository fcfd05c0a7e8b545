// Random models and configurations with a random caller, and what training them must give: the same caller with
// everything in HBM. Everything of a case comes from its seed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/src/named_budget.h"
#include "tests/src/random_model.h"
#include "tests/src/toy_trainer.h"

namespace spillway::testing {

inline std::uint64_t hash_bytes(const void* data, std::uint64_t bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto* at = static_cast<const std::uint16_t*>(data);
  for (std::uint64_t i = 0; i < bytes / 2; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

// A backward visit's pushes: parameter and micro-batch by micro-batch.
struct RandomVisit {
  Visit visit;
  std::vector<std::uint32_t> pushed;  // parameters
};

class RandomCase {
 public:
  explicit RandomCase(std::uint64_t seed) : leaves_out(seed / 3 % 3 > 0), generator_(seed) {
    large_ = below(3) > 0;
    micro_batches = static_cast<std::uint32_t>(1 + below(3));
    make_blocks();
    make_visits();
    make_config();
  }

  std::uint64_t below(std::uint64_t end) { return generator_() % end; }
  bool chance(std::uint64_t one_in) { return below(one_in) == 0; }

  // Budgets and knobs: what may change from one run of a store to the next.
  void change_limits(Config& changed) {
    changed.knobs = {};
    changed.hbm_bytes.reset();
    changed.host_bytes.reset();
    for (const auto knob : {&DeepSpeedKnobs::max_live_parameters, &DeepSpeedKnobs::max_reuse_distance,
                            &DeepSpeedKnobs::prefetch_bucket_size, &DeepSpeedKnobs::param_persistence_threshold,
                            &DeepSpeedKnobs::model_persistence_threshold, &DeepSpeedKnobs::max_in_cpu,
                            &DeepSpeedKnobs::param_buffer_size}) {
      if (chance(8)) changed.knobs.*knob = below(large_ ? 1'000'000 : 50'000);
    }
    if (chance(6)) changed.knobs.optimizer_buffer_count = 1 + below(6);
    if (chance(6)) changed.knobs.param_buffer_count = 1 + below(6);
    for (const auto knob : {&DeepSpeedKnobs::pipeline_read, &DeepSpeedKnobs::pipeline_write}) {
      if (chance(6)) changed.knobs.*knob = chance(2);
    }
    changed.threads = static_cast<unsigned>(1 + below(5));
    changed.io_engine = static_cast<IoEngineKind>(below(kIoEngineNames.size()));
    constexpr std::uint64_t kPieces[] = {64 * kKiB, 256 * kKiB, 1 * kMiB, 3 * kMiB};
    changed.io_block_bytes = kPieces[below(4)];
    changed.io_depth = static_cast<std::uint32_t>(1 + below(32));
    const bool tight_hbm = !chance(3), tight_host = !chance(3);
    const std::uint64_t more_hbm = chance(2) ? 0 : below(large_ ? 4 * kMiB : 256 * kKiB);
    const std::uint64_t more_host = chance(2) ? 0 : below(64 * kMiB);
    for (bool hbm : {true, false}) {
      if (!(hbm ? tight_hbm : tight_host)) continue;
      auto& budget = hbm ? changed.hbm_bytes : changed.host_bytes;
      budget = 1;
      try {
        make_plan(changed, model);
      } catch (const Error& error) {
        if (error.code() != Code::kDoesNotFit) throw;
        budget = named_bytes(error) + (hbm ? more_hbm : more_host);
      }
    }
  }

  ModelDescription model;
  Config config;
  std::uint32_t micro_batches = 1;
  const bool leaves_out;            // some pushes bring no gradient, and some parameters get none in a step
  bool bursts = false;              // every fourth step's gradients are a thousand times as large
  std::vector<RandomVisit> visits;  // of the caller

 private:
  std::uint64_t rows() {
    if (chance(6)) return 1;
    if (!large_) return 1 + below(3000);
    constexpr std::uint64_t kEdges[] = {65536, 102400, 131072, 262144, 524288};
    return chance(3) ? kEdges[below(5)] - 1 + below(3) : 1 + below(300'000);
  }

  void make_blocks() {
    for (std::uint64_t b = 0, count = 2 + below(4); b < count; ++b) {
      Block block{.name = "h." + std::to_string(b), .parameters = {}};
      for (std::uint64_t p = 0, parameters = 1 + below(3); p < parameters; ++p) {
        block.parameters.push_back({.name = block.name + "." + std::to_string(p), .shape = {rows(), 1}});
        block.parameters.back().trainable = !chance(6);
      }
      for (const Parameter& parameter : block.parameters)
        model.workspace_bytes = std::max(model.workspace_bytes, count_of(parameter) * 4);
      model.blocks.push_back(block);
    }
  }

  // Forward over all blocks, backward in reverse; the first block also at the end, or some blocks twice.
  void make_visits() {
    const auto blocks = static_cast<std::uint32_t>(model.blocks.size());
    for (std::uint32_t b = 0; b < blocks; ++b) {
      visits.push_back({{b, Pass::kForward}, {}});
      if (chance(8)) visits.push_back({{static_cast<std::uint32_t>(below(b + 1)), Pass::kForward}, {}});
    }
    const std::size_t backward = visits.size();
    if (chance(2)) visits.push_back({{0, Pass::kBackward}, {}});
    for (std::uint32_t b = blocks; b-- > 0;) {
      visits.push_back({{b, Pass::kBackward}, {}});
      if (chance(6)) visits.push_back({{b, Pass::kBackward}, {}});
    }
    if (chance(4)) visits.push_back({{static_cast<std::uint32_t>(below(blocks)), Pass::kBackward}, {}});
    for (std::uint32_t b = 0; b < blocks; ++b) {
      std::vector<std::size_t> of;
      for (std::size_t v = backward; v < visits.size(); ++v) {
        if (visits[v].visit.block == b) of.push_back(v);
      }
      for (std::uint32_t p = 0; p < model.blocks[b].parameters.size(); ++p) {
        Parameter& parameter = model.blocks[b].parameters[p];
        if (!parameter.trainable) continue;
        const std::size_t sure = of[below(of.size())];
        parameter.pushes = 0;
        for (std::size_t v : of) {
          if (v != sure && chance(2)) continue;
          visits[v].pushed.push_back(p);
          parameter.pushes += micro_batches;
        }
      }
    }
    if (chance(3)) return;
    for (const RandomVisit& visit : visits) model.visits.push_back(visit.visit);
  }

  void make_config() {
    const auto& [parameters, states] = kPlacements[chance(2) ? std::size(kPlacements) - 1 : below(7)];
    config = config_for(parameters, states, kDTypes[below(3)]);
    make_loss_scale();
    constexpr double kClips[] = {0, 0, 1, 0.05, 20};
    config.gradient_clipping = kClips[below(5)];
    bursts = chance(2);
    if (chance(2)) config.speculative_blocks = static_cast<std::uint32_t>(below(5));
    config.optimizer.kind = static_cast<OptimizerKind>(chance(2) ? 0 : below(4));
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.weight_decay = chance(2) ? 0.01 : 0;
    config.optimizer.momentum = 0.9;
    constexpr std::uint64_t kSmall[] = {1024, 3072, 16384, 4 << 20}, kLarge[] = {65536, 102400, 262144, 4 << 20};
    config.tile_elements = (large_ ? kLarge : kSmall)[below(4)];
    if (chance(2)) config.commit_every = static_cast<std::uint32_t>(below(4));
    if (config.commit_every == 2u) config.commit_every = 1;
    const bool store = !config.nvme_paths.empty() || chance(2);
    config.nvme_paths.clear();
    for (std::uint64_t i = 0, paths = chance(2) ? 1 : 1 + below(3); store && i < paths; ++i) {
      config.nvme_paths.emplace_back(std::to_string(i));  // below the directory of the run
      config.nvme_rates.push_back(1 + static_cast<double>(below(3)));
    }
  }

  // A gradient is about 0.02, and a thousand times as large in a burst: most of these overflow in some step.
  void make_loss_scale() {
    if (config.weights != DType::kFloat16) return;
    if (chance(4)) config.loss_scale.fixed = chance(2) ? 1024 : 3e6;
    config.loss_scale.initial_power = static_cast<std::uint32_t>(8 + below(18));
    config.loss_scale.window = 1 + below(3);
    config.loss_scale.hysteresis = static_cast<std::uint32_t>(1 + below(3));
    config.loss_scale.consecutive_hysteresis = chance(2);
  }

  std::mt19937_64 generator_;
  bool large_ = false;
};

// The caller. A step's gradients are a function of its weights, its number and the place in it.
struct RandomCaller {
  RandomCase& random;
  Engine& engine;
  std::uint64_t seed = 0;                  // of what changes no bit: orders, releases, visits besides
  std::optional<std::size_t> poison = {};  // the push that holds a NaN
  std::function<void()> between = {};      // before every visit
  std::function<void(std::uint32_t, std::uint64_t)> seen = {};  // block, hash of the weights of a visit
  bool visits_besides = false;

  std::uint64_t hash_of(Lease& lease, std::uint32_t block) {
    std::uint64_t hash = 0;
    const auto& parameters = random.model.blocks[block].parameters;
    for (std::uint32_t p = 0; p < parameters.size(); ++p) {
      const void* weight = lease.weight(p);
      const std::uint64_t bytes = count_of(parameters[p]) * size_of(random.config.weights);
      engine.stream().launch([&hash, weight, bytes](HostWorkers&) { hash = hash * 31 + hash_bytes(weight, bytes); });
    }
    engine.stream().synchronize();
    return hash;
  }

  void read_block(std::uint32_t block, Pass pass) {
    Lease lease = engine.acquire(block, pass, engine.stream());
    if (seen) seen(block, hash_of(lease, block));
  }

  // Nothing changes in the last steps, which then move the same bytes.
  bool brings_nothing(std::uint64_t step, std::uint32_t block, std::uint32_t parameter, std::uint64_t salt) const {
    if (!random.leaves_out) return false;
    const std::uint64_t when = std::min<std::uint64_t>(step, 5);
    return mixed(when, block * 16 + parameter, 0) < -0.4f || mixed(when, block * 16 + parameter, salt + 1) < -0.6f;
  }

  void push(std::uint32_t block, std::uint32_t parameter, const void* weight, std::uint64_t salt, bool nan) {
    const std::uint64_t count = count_of(random.model.blocks[block].parameters[parameter]);
    const std::uint64_t step = engine.current_step() + 1;
    const DType type = random.config.weights;
    if (!nan && brings_nothing(step, block, parameter, salt)) {
      engine.push_gradient({.block = block, .parameter = parameter}, engine.stream());
      return;
    }
    const bool rounded = type != DType::kFloat32 && salt % 5 == 0;
    const float gain = (random.bursts && step % 4 == 0 ? 1000.f : 1.f) * static_cast<float>(engine.loss_scale());
    auto* wide = reinterpret_cast<float*>(engine.workspace().data());
    engine.stream().launch([=](HostWorkers&) {
      auto* narrow = reinterpret_cast<std::uint16_t*>(wide);
      for (std::uint64_t i = 0; i < count; ++i) {
        const float w = weight_at(weight, type, i);
        float gradient = gain * (0.01f * w + 0.02f * mixed(step * 64 + salt, block * 16 + parameter, i));
        if (nan && i == count / 2) gradient = NAN;
        if (rounded) {
          narrow[i] = type == DType::kFloat16
                          ? float_to_fp16(gradient)
                          : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(gradient) >> 16);
        } else {
          wide[i] = gradient;
        }
      }
    });
    engine.push_gradient(
        {.block = block, .parameter = parameter, .data = wide, .dtype = rounded ? type : DType::kFloat32},
        engine.stream());
  }

  StepReport run_step(std::span<const std::byte> blob = {}) {
    std::mt19937_64 order(seed + engine.current_step());
    const auto below = [&order](std::uint64_t end) { return order() % end; };
    std::size_t pushed = 0;
    const auto besides = [&] {
      if (!visits_besides || below(4) > 0) return;
      read_block(static_cast<std::uint32_t>(below(random.model.blocks.size())),
                 below(2) ? Pass::kForward : Pass::kBackward);
    };
    for (std::size_t v = 0; v < random.visits.size(); ++v) {
      const RandomVisit& visit = random.visits[v];
      const std::uint32_t block = visit.visit.block;
      if (between) between();
      besides();
      Lease lease = engine.acquire(block, visit.visit.pass, engine.stream());
      if (seen) seen(block, hash_of(lease, block));
      std::vector<std::uint32_t> left;  // once for each push
      for (std::uint32_t p : visit.pushed) left.insert(left.end(), random.micro_batches, p);
      std::ranges::shuffle(left, order);
      std::vector<std::uint32_t> micro_batch(random.model.blocks[block].parameters.size());
      for (std::uint32_t p : left) {
        const std::uint64_t salt = v * 4 + micro_batch[p]++;
        push(block, p, lease.weight(p), salt, poison == pushed++);
      }
      if (below(2)) lease.release();
    }
    besides();
    if (between) between();
    return engine.step(blob);
  }
};

// What every layout must give, by step.
struct Expected {
  std::vector<std::vector<std::uint32_t>> weights;  // exported, exact
  std::vector<std::vector<std::uint64_t>> visited;  // hash of each block's weights
  std::vector<double> norms;
  std::vector<std::optional<double>> loss_scales;
};

inline Config config_in_hbm(const RandomCase& random) {
  Config config;
  config.weights = random.config.weights;
  config.optimizer = random.config.optimizer;
  config.loss_scale = random.config.loss_scale;
  config.gradient_clipping = random.config.gradient_clipping;
  config.tile_elements = random.config.tile_elements;
  config.threads = 2;
  return config;
}

inline Expected in_hbm(RandomCase& random, std::uint64_t steps) {
  auto engine = Engine::create(config_in_hbm(random), random.model);
  engine->import_weights(toy_weights());
  Expected expected;
  RandomCaller caller{random, *engine};
  for (std::uint64_t step = 0;; ++step) {
    expected.weights.push_back(exported(*engine));
    expected.visited.emplace_back(random.model.blocks.size());
    if (step == steps) return expected;
    caller.seen = [&](std::uint32_t block, std::uint64_t hash) { expected.visited.back()[block] = hash; };
    const StepReport report = caller.run_step();
    expected.norms.push_back(report.gradient_norm);
    expected.loss_scales.push_back(report.loss_scale);
  }
}

}  // namespace spillway::testing
