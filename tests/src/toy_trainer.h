// A caller of the engine small enough to see through: every block's gradient is a fixed function of its weights, the
// step and the micro-batch, computed on the device stream. Any layout must train it to the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/engine.h"
#include "spillway/fp16.h"
#include "tests/temp_directory.h"

namespace spillway::testing {

// `in_turn`: each micro-batch goes through the whole model before the next; else through a block.
inline ModelDescription toy_model(std::uint32_t blocks, std::uint64_t width, std::uint32_t micro_batches,
                                  bool visits = true, bool in_turn = false) {
  ModelDescription model;
  // Block 0 is visited first and last, as a tied embedding is.
  model.blocks.push_back({"embedding",
                          {{.name = "wte", .shape = {width, 7}, .pushes = micro_batches * 2, .in_order = in_turn},
                           {.name = "norm", .shape = {width}, .pushes = micro_batches}}});
  for (std::uint32_t b = 1; b <= blocks; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name,
                            {{.name = name + ".weight", .shape = {width, 3}, .pushes = micro_batches},
                             {.name = name + ".bias", .shape = {width / 2 + 1}, .pushes = micro_batches}}});
  }
  std::uint64_t largest = 0;
  for (const Block& block : model.blocks) {
    for (const Parameter& p : block.parameters) {
      std::uint64_t count = 1;
      for (std::uint64_t d : p.shape) count *= d;
      largest = std::max(largest, count);
    }
  }
  model.workspace_bytes = largest * 4;
  if (!visits) return model;
  for (std::uint32_t rounds = in_turn ? micro_batches : 1; rounds > 0; --rounds) {
    for (std::uint32_t b = 0; b <= blocks; ++b) model.visits.push_back({b, Pass::kForward});
    model.visits.push_back({0, Pass::kBackward});  // the head
    for (std::uint32_t b = blocks; b > 0; --b) model.visits.push_back({b, Pass::kBackward});
    model.visits.push_back({0, Pass::kBackward});
  }
  return model;
}

inline std::uint64_t count_of(const Parameter& parameter) {
  std::uint64_t count = 1;
  for (std::uint64_t d : parameter.shape) count *= d;
  return count;
}

[[gnu::always_inline]] inline float mixed(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + 1;
  x ^= x >> 31;
  x *= 0xd6e8feb86659fd93u;
  x ^= x >> 29;
  return static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
}

inline WeightSource toy_weights() {
  return [](std::uint32_t block, std::uint32_t parameter, std::uint64_t first, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = 0.1f * mixed(block, parameter, first + i);
  };
}

[[gnu::always_inline]] inline float weight_at(const void* weights, DType type, std::uint64_t i) {
  if (type == DType::kFloat32) return static_cast<const float*>(weights)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(weights)[i];
  return type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

struct ToyNumbers {
  float factor, unit, loss_scale;
  std::uint64_t seed, where;
};

// On copies, which a thread sanitizer need not watch: it watches the copying, and that is ten times as fast.
__attribute__((no_sanitize("thread"))) inline void toy_gradients(const ToyNumbers& of, const void* weights, DType type,
                                                                 std::uint64_t first, float* out, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    float g = of.factor * (0.01f * weight_at(weights, type, i) + 0.02f * mixed(of.seed, of.where, first + i));
    if (of.unit > 0) g = std::round(g / of.unit) * of.unit;
    out[i] = of.loss_scale * g;
  }
}

enum class Brings { kGradient, kNothing, kZeros };

// One of the pushes of a step. `part`: twice the micro-batch, and one more in the head.
struct ToyPush {
  std::uint64_t step = 0;
  std::uint32_t block = 0, parameter = 0;
  std::uint64_t part = 0;
};

struct ToyTrainer {
  Engine& engine;
  const ModelDescription& model;
  DType type;
  std::uint32_t micro_batches;
  std::uint64_t poison_step = 0;          // in this step one gradient holds a NaN
  std::vector<std::uint64_t> blob{0};     // of a step: its number in every word
  std::uint32_t poison_block = 1;         // of this block
  std::function<void()> between = [] {};  // called before every visit and before step()
  std::function<float(std::uint64_t)> gain = [](std::uint64_t) { return 1.f; };  // of every gradient in a step
  std::function<std::uint64_t(std::uint64_t)> data_of = [](std::uint64_t step) { return step; };
  std::function<Brings(const ToyPush&)> brings = [](const ToyPush&) { return Brings::kGradient; };
  float rounded_to = 0;                 // gradients, before they are scaled: multiples of it
  bool in_turn = false;                 // as the model's
  std::uint32_t first_micro_batch = 0;  // of a step, that is this rank's
  // Faults that the same-bits tests must notice:
  bool swap_micro_batches = false;
  bool use_after_release = false;

  // gradient[i] = 0.01 · weight[i] + noise(step, micro-batch, i), times the loss scale, into the workspace, then
  // pushed.
  void push(std::uint32_t block, std::uint32_t parameter, const void* weight, std::uint64_t step, std::uint64_t salt) {
    const std::uint64_t count = count_of(model.blocks[block].parameters[parameter]);
    float* gradient = reinterpret_cast<float*>(engine.workspace().data());
    const DType dtype = type;
    const bool poison = step == poison_step && block == poison_block && parameter == 0;
    const Brings what = brings({.step = step, .block = block, .parameter = parameter, .part = salt});
    if (what == Brings::kNothing) {
      engine.push_gradient({.block = block, .parameter = parameter, .micro_batch = of(salt)}, engine.stream());
      return;
    }
    const ToyNumbers numbers = {.factor = gain(step),
                                .unit = rounded_to,
                                .loss_scale = static_cast<float>(engine.loss_scale()),
                                .seed = data_of(step) * 64 + salt,
                                .where = block * 16 + parameter};
    engine.stream().launch([=](HostWorkers& workers) {
      const std::size_t chunks = (count + 4095) / 4096;
      workers.parallel_for(chunks, [=](std::size_t chunk) {
        const std::uint64_t first = chunk * 4096, number = std::min<std::uint64_t>(count - first, 4096);
        alignas(float) std::byte weights[4096 * sizeof(float)];
        float gradients[4096];
        const std::size_t size = dtype == DType::kFloat32 ? 4 : 2;
        std::memcpy(weights, static_cast<const std::byte*>(weight) + first * size, number * size);
        toy_gradients(numbers, weights, dtype, first, gradients, number);
        std::memcpy(gradient + first, gradients, number * sizeof(float));
      });
      if (what == Brings::kZeros) std::memset(gradient, 0, count * sizeof(float));
      if (poison) gradient[count / 2] = NAN;
    });
    engine.push_gradient(
        {.block = block, .parameter = parameter, .data = gradient, .dtype = DType::kFloat32, .micro_batch = of(salt)},
        engine.stream());
  }
  static std::uint32_t of(std::uint64_t part) { return static_cast<std::uint32_t>(part / 2); }

  StepReport run_step() {
    const std::uint64_t step = engine.current_step() + 1;
    const std::uint32_t first = first_micro_batch, end = first + micro_batches;
    for (std::uint32_t m = first; m < (in_turn ? end : first + 1); ++m) {
      in_turn ? pass(step, m, m + 1) : pass(step, first, end);
    }
    between();
    std::ranges::fill(blob, step);
    return engine.step(std::as_bytes(std::span(blob)));
  }

  // Forward and backward of some of the micro-batches.
  void pass(std::uint64_t step, std::uint32_t first, std::uint32_t end) {
    const auto blocks = static_cast<std::uint32_t>(model.blocks.size());
    for (std::uint32_t b = 0; b < blocks; ++b) {
      between();
      engine.acquire(b, Pass::kForward, engine.stream());
    }
    auto visit = [&](std::uint32_t block, bool head) {
      between();
      Lease lease = engine.acquire(block, Pass::kBackward, engine.stream());
      const void* weights[2] = {};  // a block of this model has two parameters
      for (std::uint32_t p = 0; p < 2; ++p) weights[p] = lease.weight(p);
      if (use_after_release) lease.release();
      for (std::uint32_t i = first; i < end; ++i) {
        const std::uint32_t m = swap_micro_batches ? micro_batches - 1 - i : i;
        for (std::uint32_t p = 0; p < model.blocks[block].parameters.size(); ++p) {
          if (block == 0 && p == 1 && !head) continue;  // the norm belongs to the head
          if (model.blocks[block].parameters[p].trainable) push(block, p, weights[p], step, m * 2 + head);
        }
      }
    };
    visit(0, true);
    for (std::uint32_t b = blocks - 1; b > 0; --b) visit(b, false);
    visit(0, false);
  }
};

// The loss scale at which some steps of a toy overflow and some do not: of two, or one, of the first, and then of one
// in three.
inline constexpr LossScaleConfig kOverflowing{.initial_power = 21, .window = 1, .hysteresis = 1};

// A run of the toy model with the settings that all of these tests share.
inline Config toy_config(Placement parameters, Placement states, DType type, const std::filesystem::path& store) {
  Config config;
  config.weights = type;
  config.loss_scale = kOverflowing;
  config.gradient_clipping = 1.0;
  config.speculative_blocks = 0;  // how many are best is a matter of time
  config.optimizer = {.learning_rate = 1e-2, .weight_decay = 0.01};
  config.parameters = parameters;
  config.states = states;
  config.tile_elements = 4096;
  config.threads = 2;
  config.device = DeviceKind::kHost;  // what the toy computes with
  if (states == Placement::kNvme || parameters == Placement::kNvme) config.nvme_paths = {store};
  return config;
}

// Every exported value in order, as bits.
inline std::vector<std::uint32_t> exported(Engine& engine) {
  std::vector<std::uint32_t> bits;
  engine.export_weights(true, [&](std::uint32_t, std::uint32_t, std::uint64_t, std::span<const float> values) {
    const std::size_t at = bits.size();
    bits.resize(at + values.size());
    std::memcpy(bits.data() + at, values.data(), values.size_bytes());
  });
  return bits;
}

using TempStore = TempDirectory;

}  // namespace spillway::testing
