// Runs of the toy model on several ranks, which are threads of this process, each with an engine and a store of its
// own.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/src/comm/thread_ranks.h"
#include "tests/src/layout_cases.h"
#include "tests/src/toy_trainer.h"

namespace spillway::testing {

struct RanksCase {
  LayoutCase layout;
  DType type = DType::kBFloat16;
  std::uint32_t micro_batches = 4;  // of a step, over all ranks
  std::uint32_t sum_groups = 4;
  std::function<void(Config&)> change = [](Config&) {};
  std::function<void(ModelDescription&)> describe = [](ModelDescription&) {};
  std::uint32_t paths = 0;  // so many have a store, wherever the layout has weights and states; 0: as the layout says
};

// As `spillway finetune` has them.
inline std::filesystem::path place_of_rank(const std::filesystem::path& directory, std::uint32_t rank,
                                           std::uint32_t ranks) {
  return ranks == 1 ? directory : directory / ("rank" + std::to_string(rank));
}

// One rank's engine and its caller.
struct RankRun {
  RankRun(const RanksCase& of, Communicator* communicator, const std::filesystem::path& directory,
          OnExisting on_existing = OnExisting::kRefuse, const std::filesystem::path& snapshot = {})
      : rank(communicator ? communicator->rank() : 0),
        ranks(communicator ? communicator->ranks() : 1),
        model(toy_model(4, of.layout.width, of.micro_batches / ranks, of.layout.visits, of.layout.in_turn)),
        config(of.layout.config(of.type, place_of_rank(directory, rank, ranks))) {
    of.describe(model);
    if (of.paths > 0) config.nvme_paths.clear();
    for (std::uint32_t i = 0; i < of.paths; ++i)
      config.nvme_paths.push_back(place_of_rank(directory / ("drive" + std::to_string(i)), rank, ranks));
    config.nvme_rates.assign(of.paths > 1 ? of.paths : 0, 1.0);
    config.gradient_accumulation = of.micro_batches / ranks;
    config.sum_groups = of.sum_groups;
    config.threads = 1;
    of.change(config);
    of.layout.choose_budgets(config, model, {rank, ranks});
    engine = Engine::create(
        config, model,
        {.on_existing = on_existing, .snapshot = snapshot, .poison_released = true, .communicator = communicator});
    if (on_existing != OnExisting::kResume && snapshot.empty()) engine->import_weights(toy_weights());
    trainer = std::make_unique<ToyTrainer>(ToyTrainer{*engine, model, config.weights, of.micro_batches / ranks});
    trainer->in_turn = of.layout.in_turn;
    trainer->first_micro_batch = rank * trainer->micro_batches;
  }
  std::vector<StepReport> until(std::uint64_t step) {
    std::vector<StepReport> reports;
    while (engine->current_step() < step) reports.push_back(trainer->run_step());
    return reports;
  }

  const std::uint32_t rank, ranks;
  ModelDescription model;
  Config config;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<ToyTrainer> trainer;
};

struct RanksOutcome {
  std::vector<std::uint32_t> bits;
  std::vector<double> norms;
  bool operator==(const RanksOutcome&) const = default;
};

// `with`: of each rank's run, before its first step.
inline RanksOutcome train_on_ranks(
    std::uint32_t ranks, const RanksCase& of, std::uint64_t steps,
    const std::function<void(RankRun&)>& with = [](RankRun&) {}) {
  TempStore store;
  std::vector<RanksOutcome> outcomes(ranks);
  const auto body = [&](Communicator* communicator) {
    RankRun run(of, communicator, store.path());
    with(run);
    RanksOutcome& outcome = outcomes[run.rank];
    for (const StepReport& report : run.until(steps)) outcome.norms.push_back(report.gradient_norm);
    outcome.bits = exported(*run.engine);
  };
  if (ranks == 1) {
    body(nullptr);
  } else {
    run_ranks(ranks, [&](Communicator& communicator) { body(&communicator); });
  }
  for (const RanksOutcome& outcome : outcomes) EXPECT_TRUE(outcome == outcomes[0]);
  return outcomes[0];
}

// `body` of each rank of so many.
inline void on_ranks(std::uint32_t ranks, const std::function<void(Communicator*)>& body) {
  if (ranks == 1) return body(nullptr);
  run_ranks(ranks, [&](Communicator& communicator) { body(&communicator); });
}

// A run of so many ranks, up to a step.
inline void train_on(std::uint32_t ranks, const RanksCase& of, const std::filesystem::path& directory,
                     OnExisting on_existing, std::uint64_t steps, const std::function<void(RankRun&)>& then = {}) {
  on_ranks(ranks, [&](Communicator* communicator) {
    RankRun run(of, communicator, directory, on_existing);
    run.until(steps);
    if (then) then(run);
  });
}

// Their bytes, by name.
inline std::map<std::string, std::string> files_below(const std::filesystem::path& root) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().lexically_relative(root).string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

}  // namespace spillway::testing
