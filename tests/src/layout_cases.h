// The modes in which the engine makes a step, as toys: where weights and states live, when a block is updated, where
// gradients wait. Which of them a layout is follows from what the plan makes of it, so tests of the layouts ask for
// that.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/store.h"
#include "src/plan/plan.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway::testing {

struct LayoutCase {
  static constexpr std::uint32_t kMicroBatches = 2;

  std::string name;
  Placement parameters = Placement::kHbm, states = Placement::kHbm;
  std::uint64_t tile_elements = 4096;
  std::uint32_t speculative_blocks = 0;
  bool visits = true;
  std::uint64_t width = 3000;
  enum {
    kAny,
    kLeastHost,
    kSomeInHost
  } host = kAny;           // memory: as much as the plan asks for, the least, some of a cache
  bool in_turn = false;    // micro-batches go through the whole model
  bool least_hbm = false;  // their sums wait in host memory then
  unsigned threads = 2;
  IoEngineKind io_engine = IoEngineKind::kAuto;
  std::vector<double> rates = {};  // of several nvme paths

  // Of layouts of one kind all have the same bits.
  std::uint64_t kind() const { return 2 * width + in_turn; }
  ModelDescription model() const { return toy_model(4, width, kMicroBatches, visits, in_turn); }

  Config config(DType type, const std::filesystem::path& store) const {
    Config config = toy_config(parameters, states, type, store);
    config.tile_elements = tile_elements;
    config.speculative_blocks = speculative_blocks;
    config.threads = threads;
    config.io_engine = io_engine;
    if (rates.empty()) return config;
    config.nvme_rates = rates;
    config.nvme_paths.clear();
    for (std::size_t path = 0; path < rates.size(); ++path) config.nvme_paths.push_back(store / std::to_string(path));
    return config;
  }

  void choose_budgets(Config& config, const ModelDescription& description, Rank rank = {}) const {
    const auto least_of = [&](std::optional<std::uint64_t>& budget) {
      budget = 1;
      try {
        make_plan(config, description, 1, rank);
      } catch (const Error& error) {
        budget = named_bytes(error);
      }
    };
    if (least_hbm) least_of(config.hbm_bytes);
    if (host == kAny) return;
    least_of(config.host_bytes);
    if (host == kSomeInHost) *config.host_bytes += 32 << 20;
  }
};

inline const LayoutCase kInHbm{.name = "hbm"};

// What a layout is compared with.
inline LayoutCase in_hbm_like(const LayoutCase& layout) {
  return {.name = "hbm", .width = layout.width, .in_turn = layout.in_turn};
}

inline std::vector<LayoutCase> layout_cases() {
  using enum Placement;
  return {
      kInHbm,
      {.name = "host", .parameters = kHost, .states = kHost},
      {.name = "weights in hbm, states in host", .states = kHost},
      {.name = "weights in hbm, states on nvme", .states = kNvme},
      {.name = "weights in host, states on nvme", .parameters = kHost, .states = kNvme},
      {.name = "weights on nvme, states in host", .parameters = kNvme, .states = kHost},
      {.name = "nvme", .parameters = kNvme, .states = kNvme},
      {.name = "nvme, guessing", .parameters = kNvme, .states = kNvme, .speculative_blocks = 100},
      {.name = "nvme, large tiles", .parameters = kNvme, .states = kNvme, .tile_elements = 4 << 20},
      {.name = "nvme, least host", .parameters = kNvme, .states = kNvme, .host = LayoutCase::kLeastHost},
      {.name = "nvme, some in host",
       .parameters = kNvme,
       .states = kNvme,
       .speculative_blocks = 2,
       .host = LayoutCase::kSomeInHost},
      {.name = "nvme, visits recorded", .parameters = kNvme, .states = kNvme, .visits = false},
      {.name = "nvme, sums in host", .parameters = kNvme, .states = kNvme, .in_turn = true, .least_hbm = true},
      {.name = "nvme, gradients spilled",
       .parameters = kNvme,
       .states = kNvme,
       .tile_elements = 1 << 16,
       .width = 60'000,
       .host = LayoutCase::kLeastHost},
  };
}

// For tests that go through them once for each clipping: none, one that clips, and one that does not. Where few steps
// are asked for (SPILLWAY_STEPS, which tools/test.sh sets), each layout is for the one clipping at which it differs
// most: where blocks are updated inside backward, and on a guess.
inline std::vector<LayoutCase> layout_cases(double clipping) {
  auto cases = layout_cases();
  if (std::getenv("SPILLWAY_STEPS") == nullptr) return cases;
  enum Clipping { kNone, kClips, kBelowTheLimit };
  const Clipping given = clipping == 0 ? kNone : clipping < 1 ? kClips : kBelowTheLimit;
  std::erase_if(cases, [given](const LayoutCase& layout) {
    const bool on_nvme = layout.parameters == Placement::kNvme && layout.states == Placement::kNvme;
    if (layout.speculative_blocks > 0) return given != kBelowTheLimit;
    return given != (on_nvme && layout.width == LayoutCase().width ? kNone : kClips);
  });
  return cases;
}

// For tests that go through them once for each of so many forms: likewise all, or each layout for one of the forms.
inline std::vector<LayoutCase> layout_cases(std::size_t form, std::size_t forms) {
  const auto all = layout_cases();
  if (std::getenv("SPILLWAY_STEPS") == nullptr) return all;
  std::vector<LayoutCase> cases;
  for (std::size_t i = form; i < all.size(); i += forms) cases.push_back(all[i]);
  return cases;
}

inline LayoutCase layout_case(const std::string& name) {
  const auto all = layout_cases();
  return *std::ranges::find(all, name, &LayoutCase::name);
}

// A run of a layout, in a directory of its own.
struct LayoutRun {
  struct Outcome {
    std::vector<std::uint32_t> bits;
    std::vector<StepReport> reports;
  };

  // `with_store`: also where everything lives in memory.
  LayoutRun(const LayoutCase& layout, DType type, const std::function<void(Config&)>& change = {},
            bool with_store = false)
      : model(layout.model()), config(layout.config(type, store.path())), in_turn(layout.in_turn) {
    if (with_store) config.nvme_paths = {store.path()};
    if (change) change(config);
    layout.choose_budgets(config, model);
    open(OnExisting::kRefuse);
    engine->import_weights(toy_weights());
  }
  void open(OnExisting on_existing) {
    engine.reset();
    engine = Engine::create(config, model, {.on_existing = on_existing, .poison_released = true});
    trainer.emplace(ToyTrainer{*engine, model, config.weights, LayoutCase::kMicroBatches});
    trainer->in_turn = in_turn;
  }
  Outcome until(std::uint64_t step) {
    Outcome outcome;
    while (engine->current_step() < step) outcome.reports.push_back(trainer->run_step());
    outcome.bits = exported(*engine);
    return outcome;
  }

  TempStore store;
  ModelDescription model;
  Config config;
  const bool in_turn;
  std::unique_ptr<Engine> engine;
  std::optional<ToyTrainer> trainer;
};

// The engine ends: its store is at that step, and no byte of it is bad.
inline void end_and_expect_store_at(LayoutRun& run, std::uint64_t step) {
  run.engine.reset();
  EXPECT_EQ(inspect_store({run.store.path()}).step, step);
  std::uint64_t bad = 0;
  verify_store({run.store.path()}, {.on_bad = [&](const BadExtent&) { ++bad; }});
  EXPECT_EQ(bad, 0u);
}

}  // namespace spillway::testing
