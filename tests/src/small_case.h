// Runs of a few tiles for tests that open thousands of stores: a random model and layout, all from a seed, and the
// commits, norms and weights of a run that nothing interrupts.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/config/loss_scaler.h"
#include "src/plan/plan.h"
#include "tests/aio/simulated_disk.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway::testing {

// A manifest record among a log's writes.
inline std::optional<Manifest> manifest_in(const DiskChange& change, const Plan& plan) {
  Manifest manifest;
  if (change.op != DiskOp::kWrite || change.data->size() != record_bytes(record_form(plan))) return std::nullopt;
  const auto state = decode_record(*change.data, record_form(plan), manifest);
  return state == RecordState::kValid ? std::optional(manifest) : std::nullopt;
}

struct SmallCase {
  static constexpr std::uint64_t kSteps = 5;

  // Seeds in a row differ in what matters most.
  explicit SmallCase(std::uint64_t seed) : seed(seed), random(seed) {
    constexpr std::uint32_t kIntervals[] = {1, 3, 1, 0};
    micro_batches = 1 + static_cast<std::uint32_t>(random() % 2);
    spilled = seed % 11 == 5;
    blob_words = 64 + random() % 300;  // a record takes several sectors
    const std::uint32_t blocks = 1 + static_cast<std::uint32_t>(random() % 3);
    // Gradients are spilled when they are larger than the memory that spilling takes.
    const bool fp16 = seed % 7 == 2;  // and some of the steps overflow
    model =
        spilled ? toy_model(2, fp16 ? 120'000 : 60'000, 1) : toy_model(blocks, 300 + random() % 1200, micro_batches);
    if (spilled) micro_batches = 1;
    if (!spilled && random() % 4 == 0) model.blocks[1].parameters[1].trainable = false;
    if (random() % 4 == 0) model.visits.clear();
    config = toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat32, "");
    if (!spilled && random() % 2 == 0) config.weights = DType::kBFloat16;
    if (fp16) config.weights = DType::kFloat16;
    config.tile_elements = spilled ? 1 << 16 : 1024u << random() % 3;
    config.optimizer.kind = static_cast<OptimizerKind>(random() % 3 == 0 ? random() % 4 : 0);
    config.gradient_clipping = seed / 4 % 2 == 0 && !spilled ? 0 : 0.5;
    config.commit_every = kIntervals[seed % 4];
    config.io_engine = IoEngineKind::kThreads;  // what the simulated disk sees
    config.io_depth = 1 + static_cast<std::uint32_t>(random() % 3);
    config.io_block_bytes = (64 * kKiB) << random() % 3;
    config.nvme_paths.clear();
    for (std::uint64_t i = 0, paths = random() % 3 == 0 ? 2 + random() % 2 : 1; i < paths; ++i) {
      config.nvme_paths.push_back("disk" + std::to_string(i));  // below the root of the disk
      config.nvme_rates.push_back(1 + static_cast<double>(random() % 3));
    }
    choose_layout();
    plan = make_plan(config, model);
  }

  Config config_below(const std::filesystem::path& root) const {
    Config placed = config;
    for (auto& path : placed.nvme_paths) path = root / path;
    return placed;
  }

  std::string text() const {
    std::ostringstream text;
    text << "SPILLWAY_CASE=" << seed << ": " << plan.tiles.size() << " tiles of " << config.tile_elements << " "
         << name_of(config.weights) << ", layout " << layout << (spilled ? ", spilled" : "") << ", clipping "
         << config.gradient_clipping << ", commit_every " << *config.commit_every << ", paths "
         << config.nvme_paths.size();
    return text.str();
  }

  const std::uint64_t seed;
  std::mt19937_64 random;
  std::uint32_t micro_batches = 1;
  std::size_t blob_words = 1;
  bool spilled = false;
  const char* layout = "nvme";
  ModelDescription model;
  Config config;
  Plan plan;

 private:
  void choose_layout() {
    const auto least_host = [this] {
      config.host_bytes = 1;
      try {
        make_plan(config, model);
      } catch (const Error& error) {
        return named_bytes(error);
      }
      return std::uint64_t{0};
    };
    if (spilled) {
      config.host_bytes = least_host();
      return;
    }
    switch (random() % 5) {
      case 0: return;
      case 1: config.host_bytes = least_host(); return void(layout = "nvme, least host");
      case 2:
        config.host_bytes = least_host() + (1 + random() % 20) * 256 * kKiB;
        return void(layout = "nvme, some tiles in host");
      case 3: config.states = Placement::kHost; return void(layout = "weights nvme, states host");
      default:
        config.parameters = random() % 2 == 0 ? Placement::kHost : Placement::kHbm;
        return void(layout = "weights in memory, states nvme");
    }
  }
};

inline ToyTrainer trainer_of(const SmallCase& small, Engine& engine) {
  ToyTrainer trainer{engine, small.model, small.config.weights, small.micro_batches};
  trainer.blob.resize(small.blob_words);
  return trainer;
}

inline bool is_blob_of(const SmallCase& small, std::uint64_t step, std::span<const std::byte> blob) {
  const std::vector<std::uint64_t> expected(step == 0 ? 0 : small.blob_words, step);
  return std::ranges::equal(blob, std::as_bytes(std::span(expected)));
}

// The same in what a commit keeps: in fp16 after the loss scaler's state.
inline bool is_record_of(const SmallCase& small, std::uint64_t step, std::span<const std::byte> record) {
  const std::size_t before = small.config.weights == DType::kFloat16 ? LossScalerState::kBytes : 0;
  return record.size() >= before && is_blob_of(small, step, record.subspan(before));
}

// `<object>: <what happened> (<errno text>); <what to do>`, no part of it missing.
inline bool is_clear(const Error& error) {
  const ErrorParts& parts = error.parts();
  const bool has_text = !parts.object.empty() && !parts.happened.empty() && !parts.hint.empty();
  return has_text && (error.code() != Code::kIo || parts.errno_value != 0 || parts.object == "engine");
}

// Where thousands of small stores are made and removed: in memory, where the machine has such a directory.
inline TempDirectory quick_directory() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code failure;
  const auto room = std::filesystem::space(memory, failure);
  const bool in_memory = !failure && ::access(memory.c_str(), W_OK) == 0 && room.available > kGiB;
  return TempDirectory(in_memory ? memory : std::filesystem::temp_directory_path());
}

// By step, from 0 on.
struct Uninterrupted {
  std::vector<std::vector<std::uint32_t>> weights;  // exported, exact
  std::vector<double> norms;
  std::map<std::uint64_t, Manifest> commits;  // with the checksums of all tiles

  // Everything in HBM, and a store beside it.
  Uninterrupted(const SmallCase& small, const std::filesystem::path& root) {
    std::filesystem::create_directories(root);
    SimulatedDisk disk(root);
    Config config = small.config_below(root);
    config.parameters = config.states = Placement::kHbm;
    config.host_bytes.reset();
    config.commit_every = 1;
    {
      auto engine = Engine::create(config, small.model);
      engine->import_weights(toy_weights());
      weights.push_back(exported(*engine));
      norms.push_back(0);
      ToyTrainer trainer = trainer_of(small, *engine);
      for (std::uint64_t step = 1; step <= SmallCase::kSteps; ++step) {
        norms.push_back(trainer.run_step().gradient_norm);
        weights.push_back(exported(*engine));
      }
    }
    for (const DiskChange& change : disk.log().changes) {
      if (auto manifest = manifest_in(change, small.plan)) commits[manifest->step] = std::move(*manifest);
    }
    std::filesystem::remove_all(root);
  }
};

}  // namespace spillway::testing
