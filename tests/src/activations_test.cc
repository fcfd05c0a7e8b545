// Activations of a whole run: in HBM, in host memory and on NVMe, by budget. What a read sees never depends on it, nor
// does a trained bit.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <random>

#include "spillway/error.h"
#include "src/plan/plan.h"
#include "swap/store_files.h"
#include "tests/error_of.h"
#include "tests/kernels/random.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"
#include "tests/src/uses_between_visits.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

using testing::error_of;
using testing::TempStore;
using testing::toy_config;
using testing::ToyTrainer;
using testing::UsesBetweenVisits;

constexpr std::uint32_t kBlocks = 4, kMicroBatches = 2, kHeld = 2;
constexpr std::uint32_t kParts = 2 * kBlocks + 4;  // calls of ToyTrainer::between in a step
constexpr DType kType = DType::kBFloat16;

ModelDescription model_with(std::vector<ActivationUse> uses, std::mt19937_64& random) {
  ModelDescription model = testing::toy_model(kBlocks, 2000, kMicroBatches);
  std::uint32_t most = 0;
  for (const ActivationUse& use : uses) most = std::max(most, use.activation);
  for (std::uint32_t a = 0; a <= most; ++a) model.activations.push_back({.bytes = 1 + random() % (400 * 1024)});
  const auto last = static_cast<std::uint32_t>(model.visits.size() - 1);
  for (ActivationUse& use : uses) use.visit = std::min(use.visit, last);
  model.activation_uses = std::move(uses);
  model.activations_held = kHeld;
  return model;
}

struct Training {
  Training(const Config& config, const ModelDescription& model, OnExisting existing = OnExisting::kReplace)
      : engine(Engine::create(config, model, {.on_existing = existing})),
        uses(*engine, model, kHeld, kParts),
        trainer{*engine, model, kType, kMicroBatches} {
    if (existing != OnExisting::kResume) engine->import_weights(testing::toy_weights());
    trainer.between = [this] { uses.run_part(); };
  }
  std::unique_ptr<Engine> engine;
  UsesBetweenVisits uses;
  ToyTrainer trainer;
};

std::uint64_t named_by_refusal(const Config& config, const ModelDescription& model) {
  try {
    make_plan(config, model);
  } catch (const Error& error) {
    return testing::named_bytes(error);
  }
  ADD_FAILURE() << "nothing was refused";
  return 0;
}

std::uint64_t least_hbm(Config config, const ModelDescription& model) {
  config.hbm_bytes = 1;
  return named_by_refusal(config, model);
}
std::uint64_t least_host(Config config, const ModelDescription& model) {
  config.host_bytes = 1;
  return named_by_refusal(config, model);
}

struct Where {
  bool hbm = false, host = false, nvme = false;  // some activation moves between them
};
Where homes_of(const Plan& plan) {
  Where where{.hbm = plan.activations.uses.empty()};
  for (const ActivationPlan::At& at : plan.activations.homes) {
    where.host |= at.home == Placement::kHost;
    where.nvme |= at.home == Placement::kNvme;
  }
  return where;
}

const std::pair<Placement, Placement> kPlacements[] = {{Placement::kHbm, Placement::kHbm},
                                                       {Placement::kHost, Placement::kHost},
                                                       {Placement::kHbm, Placement::kNvme},
                                                       {Placement::kNvme, Placement::kNvme}};

// Random uses and budgets, from the smallest that is accepted to more than everything needs.
TEST(Activations, AReadSeesTheLastWriteAndTheBitsAreTheSameWhereverTheyLive) {
  std::mt19937_64 random = seeded_generator();
  Where seen;
  std::vector<std::uint32_t> expected;
  const auto all_seen = [&seen] { return seen.hbm && seen.host && seen.nvme; };
  for (int round = 0; (round < 24 || (!all_seen() && round < 500)) && !::testing::Test::HasFailure(); ++round) {
    const ModelDescription model =
        model_with(round % 2 == 0 ? testing::transformer_uses(kBlocks, 1 + static_cast<std::uint32_t>(random() % 4))
                                  : testing::random_uses(random, 12),
                   random);
    const auto& [parameters, states] = kPlacements[round / 2 % 4];
    TempStore store;
    Config config = toy_config(parameters, states, kType, store.path());
    if (random() % 2 == 0) config.io_engine = IoEngineKind::kThreads;
    if (!expected.empty()) {
      config.hbm_bytes = least_hbm(config, model) + random() % 3 * random() % (2 << 20);
      if (random() % 3 > 0) config.host_bytes = least_host(config, model) + random() % 2 * random() % (4 << 20);
    }
    const Plan plan = make_plan(config, model);
    const Where where = homes_of(plan);
    seen = {seen.hbm || where.hbm, seen.host || where.host, seen.nvme || where.nvme};
    Training training(config, model);
    for (int step = 0; step < 3; ++step) {
      const StepReport report = training.trainer.run_step();
      EXPECT_EQ(report.unplanned_visits, 0u);
    }
    EXPECT_EQ(training.uses.wrong(), 0u);
    const auto bits = testing::exported(*training.engine);
    if (expected.empty()) expected = bits;
    EXPECT_EQ(bits, expected) << "round " << round;
  }
  EXPECT_TRUE(all_seen());
}

Config on_nvme(const TempStore& store, const ModelDescription& model) {
  Config config = toy_config(Placement::kNvme, Placement::kNvme, kType, store.path());
  config.hbm_bytes = least_hbm(config, model);
  config.host_bytes = least_host(config, model);
  return config;
}

TEST(Activations, TheStepReportCountsWhatTheyMove) {
  std::mt19937_64 random = seeded_generator();
  const ModelDescription model = model_with(testing::transformer_uses(12, 2), random);
  TempStore store, other;
  const Config config = on_nvme(store, model);
  Config roomy = config;
  roomy.hbm_bytes = *config.hbm_bytes + (100 << 20);
  roomy.nvme_paths = {other.path()};
  const Plan plan = make_plan(config, model);
  EXPECT_TRUE(homes_of(plan).nvme);
  std::uint64_t down = 0, up = 0, written = 0;
  for (std::size_t u = 0; u < plan.activations.uses.size(); ++u) {
    const std::uint64_t bytes = model.activations[model.activation_uses[u].activation].bytes;
    const bool nvme = plan.activations.homes[model.activation_uses[u].activation].home == Placement::kNvme;
    down += plan.activations.uses[u].spill ? bytes : 0;
    up += plan.activations.uses[u].fetch ? bytes : 0;
    written += plan.activations.uses[u].spill && nvme ? align_up(bytes, kExtentAlignment) : 0;
  }
  Training training(config, model), resident(roomy, model);
  for (int step = 0; step < 3; ++step) {
    const StepReport report = training.trainer.run_step(), without = resident.trainer.run_step();
    EXPECT_EQ(report.d2h_bytes, without.d2h_bytes + down);
    EXPECT_GE(report.h2d_bytes, up);
    EXPECT_EQ(report.nvme_write_bytes, without.nvme_write_bytes + written);
  }
}

// An evaluation runs the forward part alone, before a step and in the middle of one that is given up.
TEST(Activations, AStepMayBeBegunAgainFromItsFirstUse) {
  std::mt19937_64 random = seeded_generator();
  const ModelDescription model = model_with(testing::transformer_uses(6, 2), random);
  TempStore store;
  Training training(on_nvme(store, model), model);
  Engine& engine = *training.engine;
  for (int step = 0; step < 2; ++step) {
    for (std::size_t part : {5u, 17u}) {
      for (std::size_t u = 0; u < part; ++u) {
        const ActivationUse& use = model.activation_uses[u];
        engine.acquire_activation(use.activation, use.access, engine.stream());
      }
    }
    training.trainer.run_step();
  }
  EXPECT_EQ(training.uses.wrong(), 0u);
}

TEST(Activations, AUseOutOfThePlannedOrderIsRefusedAndTheStepGoesOn) {
  std::mt19937_64 random = seeded_generator();
  const ModelDescription model = model_with(testing::transformer_uses(6, 2), random);
  TempStore store;
  Training training(on_nvme(store, model), model);
  Engine& engine = *training.engine;
  training.trainer.between = [&] {
    const Error error = error_of([&] { engine.acquire_activation(13, Access::kRead, engine.stream()); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("came out of order"), std::string::npos) << error.what();
    EXPECT_EQ(error_of([&] { engine.acquire_activation(99, Access::kRead, engine.stream()); }).code(),
              Code::kInvalidArgument);
    training.uses.run_part();
  };
  training.trainer.run_step();
  EXPECT_EQ(training.uses.wrong(), 0u);
}

TEST(Activations, AStepDoesNotEndWhileOneIsHeld) {
  std::mt19937_64 random = seeded_generator();
  const ModelDescription model = model_with(testing::transformer_uses(2, 1), random);
  TempStore store;
  Training training(toy_config(Placement::kNvme, Placement::kNvme, kType, store.path()), model);
  const ActivationLease held = training.engine->acquire_activation(0, Access::kWrite, training.engine->stream());
  EXPECT_EQ(error_of([&] { training.engine->step(); }).code(), Code::kInvalidArgument);
}

// Bytes that rot on the drive between the write and the read of one step.
struct Spilling {
  ModelDescription model;
  Config config;
  Plan plan;
};
// A model that has activations on NVMe: with small ones the least budgets have room for all.
Spilling spilling(const TempStore& store, std::mt19937_64& random) {
  for (;;) {
    const ModelDescription model = model_with(testing::transformer_uses(6, 2), random);
    const Config config = on_nvme(store, model);
    const Plan plan = make_plan(config, model);
    if (homes_of(plan).nvme) return {model, config, plan};
  }
}

// Past the page cache, where the drive's I/O allows it: a dirty page beside direct writes fails the file's next sync.
void overwrite_sector(const std::filesystem::path& path, std::uint64_t offset, char first) {
  int fd = ::open(path.c_str(), O_RDWR | O_DIRECT);
  if (fd < 0) fd = ::open(path.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  alignas(4096) char sector[4096];
  EXPECT_EQ(::pread(fd, sector, sizeof sector, static_cast<off_t>(offset)), static_cast<ssize_t>(sizeof sector));
  sector[0] = first;
  EXPECT_EQ(::pwrite(fd, sector, sizeof sector, static_cast<off_t>(offset)), static_cast<ssize_t>(sizeof sector));
  ::close(fd);
}

TEST(Activations, AFlippedBitStopsTheRunAtTheLastCommit) {
  std::mt19937_64 random = seeded_generator();
  TempStore store;
  const auto [model, config, plan] = spilling(store, random);
  {
    Training training(config, model);
    training.trainer.run_step();
    training.engine->flush();
    training.trainer.between = [&, &plan = plan] {
      training.uses.run_part();
      training.engine->stream().synchronize();
      const std::uint64_t scratch = space_bytes(store_shape(plan)) - align_up(plan.scratch_bytes, kExtentAlignment);
      for (const ActivationPlan::At& at : plan.activations.homes) {
        if (at.home != Placement::kNvme) continue;
        overwrite_sector(store.path() / kStoreFileName, scratch + at.offset, static_cast<char>(random()));
      }
    };
    const Error error = error_of([&] { training.trainer.run_step(); });
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_NE(error.parts().happened.find("activation "), std::string::npos) << error.what();
    training.uses.drop();
    EXPECT_NE(std::string(error_of([&] { training.engine->flush(); }).what()).find("stopped"), std::string::npos);
  }
  Training again(config, model, OnExisting::kResume);
  EXPECT_EQ(again.engine->current_step(), 1u);
  again.trainer.run_step();
  EXPECT_EQ(again.uses.wrong(), 0u);
}

// The scratch area is the last of the file: beyond the limit every write fails, and nothing else does.
TEST(Activations, AWriteThatFailsStopsTheRunAtTheLastCommit) {
  std::mt19937_64 random = seeded_generator();
  TempStore store;
  const auto [model, config, plan] = spilling(store, random);
  {
    Training training(config, model);
    training.trainer.run_step();
    training.engine->flush();
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{space_bytes(store_shape(plan)) - align_up(plan.scratch_bytes, kExtentAlignment),
                       before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const Error error = error_of([&] { training.trainer.run_step(); });
    EXPECT_EQ(error.code(), Code::kIo) << error.what();
    EXPECT_NE(std::string(error.what()).find("write of"), std::string::npos) << error.what();
    training.uses.drop();
    EXPECT_NE(std::string(error_of([&] { training.engine->flush(); }).what()).find("stopped"), std::string::npos);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    std::signal(SIGXFSZ, handler);
  }
  Training again(config, model, OnExisting::kResume);
  EXPECT_EQ(again.engine->current_step(), 1u);
  again.trainer.run_step();
  EXPECT_EQ(again.uses.wrong(), 0u);
}

TEST(Activations, AStoreWithTooLittleScratchGrowsOnResume) {
  std::mt19937_64 random = seeded_generator();
  const ModelDescription model = model_with(testing::transformer_uses(40, 2), random);
  TempStore store;
  const Config tight = on_nvme(store, model);
  Config roomy = tight;
  roomy.hbm_bytes = *tight.hbm_bytes + (100 << 20);
  {
    Training training(roomy, model);
    training.trainer.run_step();
    training.engine->flush();
  }
  Training again(tight, model, OnExisting::kResume);
  EXPECT_EQ(again.engine->current_step(), 1u);
  again.trainer.run_step();
  EXPECT_EQ(again.uses.wrong(), 0u);
}

}  // namespace
}  // namespace spillway
