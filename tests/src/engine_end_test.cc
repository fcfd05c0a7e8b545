// What a drive does to an engine when no call follows that could say so: the engine's end logs it, with the steps that
// are lost.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/aio/simulated_disk.h"
#include "tests/aio/temp_files.h"
#include "tests/src/named_budget.h"
#include "tests/src/small_case.h"  // quick_directory()
#include "tests/src/toy_trainer.h"
#include "tests/src/watchdog.h"

namespace spillway {
namespace {

using testing::CapturedLog;
using testing::DiskCall;
using testing::DiskOp;
using testing::Fault;
using testing::SimulatedDisk;

// All on NVMe, by the engine that a simulated disk sees.
Config config_on(const TempDirectory& directory) {
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat32, directory.path() / "disk0");
  config.io_engine = IoEngineKind::kThreads;
  return config;
}

TEST(EngineEnd, AnEngineThatCannotKeepItsLastStepsSaysWhichAreLost) {
  const ModelDescription model = testing::toy_model(4, 2000, 1);
  for (const bool told : {false, true}) {
    SCOPED_TRACE(told ? "after a flush that failed" : "at the end");
    const TempDirectory directory = testing::quick_directory();
    SimulatedDisk disk(directory.path());
    Config config = config_on(directory);
    config.commit_every = 2;
    const CapturedLog log;
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, 1};
    for (int step = 1; step <= 3; ++step) trainer.run_step();
    disk.misbehave([](const DiskCall& call) {
      return call.op == DiskOp::kWrite || call.op == DiskOp::kSync ? Fault{.error = EIO} : Fault{};
    });
    if (told) {
      EXPECT_THROW(engine->flush(), Error);
    }
    engine.reset();
    EXPECT_EQ(log.count("; step 3 is lost"), 1u) << log.all();
    disk.misbehave({});
    EXPECT_EQ(Engine::create(config, model, {.on_existing = OnExisting::kResume})->current_step(), 2u);
  }
}

// A lease that is released starts the fetch of a block to come, and with it its update: what fails there no call can
// throw.
TEST(EngineEnd, AFailureThatIsSeenInAReleaseIsThrownOrLogged) {
  const ModelDescription model = testing::toy_model(4, 2000, 1);
  for (std::uint32_t fails_at = 0; fails_at < model.blocks.size(); ++fails_at) {
    for (std::uint32_t more = 0; more < model.blocks.size(); ++more) {
      SCOPED_TRACE(fmt::format("at block {}, and {} blocks more", fails_at, more));
      const TempDirectory directory = testing::quick_directory();
      SimulatedDisk disk(directory.path());
      Config config = config_on(directory);
      const CapturedLog log;
      auto engine = Engine::create(config, model);
      engine->import_weights(testing::toy_weights());
      testing::ToyTrainer trainer{*engine, model, config.weights, 1};
      for (int step = 1; step <= 3; ++step) trainer.run_step();
      bool thrown = false;
      try {
        const auto evaluate = [&](std::uint32_t block) { engine->acquire(block, Pass::kForward, engine->stream()); };
        for (std::uint32_t block = 0; block < model.blocks.size(); ++block) {
          if (block == fails_at) {
            disk.misbehave([](const DiskCall& call) {
              return call.op == DiskOp::kWrite || call.op == DiskOp::kSync ? Fault{.error = EIO} : Fault{};
            });
          }
          evaluate(block);
        }
        for (std::uint32_t block = 0; block < more; ++block) evaluate(block);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kIo) << error.what();
        thrown = true;
      }
      engine.reset();
      disk.misbehave({});
      const bool whole = Engine::create(config, model, {.on_existing = OnExisting::kResume})->current_step() == 3;
      EXPECT_TRUE(whole || thrown || log.count(" lost") > 0) << log.all();
    }
  }
}

// An activation leaves its place in HBM once the one that was there before has been written. What is written stays
// under way here until the last lease is given back, and fails then: that release is the only one to hear of it.
TEST(EngineEnd, AFailureThatAReleaseAloneSeesIsLogged) {
  ModelDescription model = testing::toy_model(2, 2000, 1);
  constexpr std::uint32_t kActivations = 16;
  for (std::uint32_t a = 0; a < kActivations; ++a) {
    model.activations.push_back({.bytes = kMiB});
    model.activation_uses.push_back({.activation = a, .access = Access::kWrite});
  }
  for (std::uint32_t a = kActivations; a-- > 0;) {
    model.activation_uses.push_back({.activation = a, .access = Access::kRead});
  }
  const TempDirectory directory = testing::quick_directory();
  SimulatedDisk disk(directory.path());
  Config config = config_on(directory);
  for (auto* budget : {&config.hbm_bytes, &config.host_bytes}) {
    *budget = 1;
    *budget = testing::named_bytes(testing::refused_plan(config, model));
  }
  ASSERT_EQ(make_plan(config, model).activations.places.size(), 1u);
  const CapturedLog log;
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  const testing::Watchdog watchdog(0);
  std::promise<void> given_back;
  disk.misbehave([end = given_back.get_future().share()](const DiskCall& call) {
    if (call.op != DiskOp::kWrite) return Fault{};
    end.wait();
    return Fault{.error = EIO};
  });
  engine->acquire_activation(0, Access::kWrite, engine->stream());
  ActivationLease last = engine->acquire_activation(1, Access::kWrite, engine->stream());
  given_back.set_value();
  last.release();
  engine.reset();
  EXPECT_EQ(log.count("(Input/output error)"), 1u) << log.all();
}

TEST(EngineEnd, AFailureWithOneSlotATileSpeaksOfNoStep) {
  const ModelDescription model = testing::toy_model(4, 2000, 1);
  const TempDirectory directory = testing::quick_directory();
  SimulatedDisk disk(directory.path());
  Config config = config_on(directory);
  config.commit_every = 0;
  const CapturedLog quiet;
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  testing::ToyTrainer trainer{*engine, model, config.weights, 1};
  trainer.run_step();
  disk.misbehave([](const DiskCall& call) { return call.op == DiskOp::kWrite ? Fault{.error = EFBIG} : Fault{}; });
  for (const char* said : {"ulimit -f), and begin again: the store has no step", "no step is kept: begin again"}) {
    try {
      for (int step = 0; step < 3; ++step) trainer.run_step();
      ADD_FAILURE() << "the drive took it";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(said), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("resume"), std::string::npos) << error.what();
    }
  }
}

// Its steps are those of a store that has its name; before the first commit there is none to go on from.
TEST(EngineEnd, AFailureBeforeTheFirstCommitSpeaksOfNoStep) {
  const ModelDescription model = testing::toy_model(2, 2000, 1);
  const TempDirectory directory = testing::quick_directory();
  SimulatedDisk disk(directory.path());
  Config config = config_on(directory);
  const CapturedLog quiet;
  auto engine = Engine::create(config, model);
  disk.misbehave([](const DiskCall& call) {
    return call.op == DiskOp::kWrite || call.op == DiskOp::kSync ? Fault{.error = ENOSPC} : Fault{};
  });
  try {
    engine->import_weights(testing::toy_weights());
    FAIL() << "a full drive took the weights";
  } catch (const Error& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("make room"), std::string::npos) << said;
    EXPECT_NE(said.find("begin again: the store has no step to go on from"), std::string::npos) << said;
    EXPECT_EQ(said.find("resume"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace spillway
