// What a caller may do with an engine beside the planned visits, and what it is told when it may not.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <thread>

#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/error_of.h"
#include "tests/kernels/random.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::error_of;

using testing::TempStore;
using testing::toy_config;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 5, kMicroBatches = 2;
constexpr std::uint64_t kWidth = 2000;
constexpr DType kType = DType::kBFloat16;

const ModelDescription& model() {
  static const ModelDescription description = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  return description;
}

// What any undisturbed run gives.
std::vector<std::uint32_t> expected_bits(int steps, const ModelDescription& description = model()) {
  auto engine = Engine::create(toy_config(Placement::kHbm, Placement::kHbm, kType, ""), description);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, description, kType, kMicroBatches};
  for (int s = 0; s < steps; ++s) trainer.run_step();
  return testing::exported(*engine);
}

// HBM for one block at a time: as many refusals as it takes to learn the least.
void take_least_hbm(Config& config) {
  config.hbm_bytes = 1;
  config.hbm_bytes = testing::named_bytes(error_of([&] { Engine::create(config, model()); }));
}

struct Training {
  explicit Training(const Config& config, EngineOptions options = {}, const ModelDescription& description = model())
      : engine(Engine::create(config, description, options)), trainer{*engine, description, kType, kMicroBatches} {
    if (options.on_existing != OnExisting::kResume) engine->import_weights(testing::toy_weights());
  }
  std::unique_ptr<Engine> engine;
  ToyTrainer trainer;
};

struct Store {
  TempStore directory;
  Config config = toy_config(Placement::kNvme, Placement::kNvme, kType, directory.path());
};

TEST(EngineUse, UnplannedVisitsAreServedReportedAndChangeNoBit) {
  std::mt19937_64 random = seeded_generator();
  const auto expected = expected_bits(4);
  for (bool least : {false, true}) {
    Store store;
    if (least) take_least_hbm(store.config);
    Training run(store.config, {.on_existing = OnExisting::kReplace, .poison_released = true});
    std::uint64_t made = 0;
    run.trainer.between = [&] {
      for (; random() % 3 == 0; ++made) {
        Lease lease = run.engine->acquire(static_cast<std::uint32_t>(random() % (kBlocks + 1)),
                                          random() % 2 == 0 ? Pass::kForward : Pass::kBackward, run.engine->stream());
      }
    };
    std::uint64_t reported = 0;
    for (int s = 0; s < 4; ++s) reported += run.trainer.run_step().unplanned_visits;
    EXPECT_GT(made, 0u);
    EXPECT_GT(reported, 0u);
    EXPECT_EQ(testing::exported(*run.engine), expected) << (least ? "one place" : "all places");
  }
}

TEST(EngineUse, ALeaseStaysValidUntilTheLastOfItsBlockIsReleased) {
  Store store;
  Training run(store.config, {.poison_released = true});
  std::vector<std::uint16_t> before(kWidth * 3), after(kWidth * 3);
  const auto copy_out = [&](const Lease& lease, std::vector<std::uint16_t>& to) {
    const void* from = lease.weight(0);
    std::uint16_t* data = to.data();
    const std::size_t bytes = to.size() * 2;
    run.engine->stream().launch([=](HostWorkers&) { std::memcpy(data, from, bytes); });
    run.engine->stream().synchronize();
  };
  Lease first = run.engine->acquire(1, Pass::kForward, run.engine->stream());
  Lease second = run.engine->acquire(1, Pass::kBackward, run.engine->stream());
  EXPECT_EQ(first.weight(0), second.weight(0));
  copy_out(first, before);
  EXPECT_EQ(before[0], split_master(0.1f * testing::mixed(1, 0, 0)).weight);
  first.release();
  first.release();  // twice is once
  copy_out(second, after);
  EXPECT_EQ(after, before);
}

TEST(EngineUse, AMovedLeaseIsReleasedOnce) {
  Store store;
  take_least_hbm(store.config);
  Training run(store.config);
  Lease lease = run.engine->acquire(0, Pass::kForward, run.engine->stream());
  Lease other = std::move(lease);
  other.release();
  Lease next = run.engine->acquire(1, Pass::kForward, run.engine->stream());
  next = run.engine->acquire(1, Pass::kForward, run.engine->stream());
  next.release();
  EXPECT_NO_THROW(run.engine->acquire(2, Pass::kForward, run.engine->stream()));
}

TEST(EngineUse, ALeaseHeldAtStepIsRefusedAndTheStepCanStillBeMade) {
  for (Placement parameters : {Placement::kHbm, Placement::kNvme}) {
    Store store;
    store.config.parameters = parameters;
    Training run(store.config);
    int refused = 0;
    std::unique_ptr<Lease> held;
    run.trainer.between = [&] { held.reset(); };
    const auto step_with_lease = [&] {
      held = std::make_unique<Lease>(run.engine->acquire(3, Pass::kForward, run.engine->stream()));
      const Error error = error_of([&] { run.engine->step(); });
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("a lease is still held"), std::string::npos);
      ++refused;
      held.reset();
    };
    step_with_lease();
    run.trainer.run_step();
    step_with_lease();
    run.trainer.run_step();
    EXPECT_EQ(testing::exported(*run.engine), expected_bits(2));
    EXPECT_EQ(refused, 2);
  }
}

TEST(EngineUse, TooManyLeasesAreRefusedWithAHintAndTheEngineGoesOn) {
  Store store;
  Training run(store.config);
  for (int s = 0; s < 2; ++s) {
    std::vector<Lease> leases;
    const Error error = error_of([&] {
      for (std::uint32_t b = 0; b <= kBlocks; ++b) {
        leases.push_back(run.engine->acquire(b, Pass::kForward, run.engine->stream()));
      }
    });
    EXPECT_EQ(error.code(), Code::kDoesNotFit);
    EXPECT_NE(error.parts().hint.find("spillway.hbm_bytes"), std::string::npos) << error.what();
    ASSERT_GE(leases.size(), 2u);
    // Come again with the visit that was refused, and go on from there: nothing is out of plan.
    const auto refused = static_cast<std::uint32_t>(leases.size());
    leases.clear();
    for (std::uint32_t b = refused; b <= kBlocks; ++b) run.engine->acquire(b, Pass::kForward, run.engine->stream());
    const StepReport report = run.trainer.run_step();  // its own forward pass begins the step again
    EXPECT_EQ(report.unplanned_visits, 0u);
  }
  EXPECT_EQ(testing::exported(*run.engine), expected_bits(2));
}

TEST(EngineUse, BackwardMayRunOnAnotherThread) {
  Store store;
  Training run(store.config);
  for (int s = 0; s < 3; ++s) {
    std::thread([&] { run.trainer.run_step(); }).join();
    run.trainer.run_step();
  }
  EXPECT_EQ(testing::exported(*run.engine), expected_bits(6));
}

TEST(EngineUse, FrozenParametersNeverChangeAndTheOthersTrainToTheSameBits) {
  ModelDescription frozen = model();
  frozen.blocks[2].parameters[0].trainable = false;
  frozen.blocks[4].parameters[0].trainable = false;
  frozen.blocks[4].parameters[1].trainable = false;
  const auto expected = expected_bits(4, frozen);
  EXPECT_NE(expected, expected_bits(4));
  for (bool least : {false, true}) {
    Store store;
    if (least) {
      store.config.host_bytes = 1;
      store.config.host_bytes = testing::named_bytes(error_of([&] { Engine::create(store.config, frozen); }));
    }
    for (int part = 0; part < 2; ++part) {
      Training run(store.config, {.on_existing = part == 0 ? OnExisting::kRefuse : OnExisting::kResume}, frozen);
      run.trainer.run_step();
      run.trainer.run_step();
      if (part == 0) continue;
      EXPECT_EQ(testing::exported(*run.engine), expected);
      run.engine->export_weights(true, [](std::uint32_t b, std::uint32_t p, std::uint64_t first, auto values) {
        if (b != 4 && !(b == 2 && p == 0)) return;
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_EQ(values[i], bf16_to_float(float_to_bf16(0.1f * testing::mixed(b, p, first + i))));
        }
      });
    }
  }
}

TEST(EngineUse, WhatDoesNotExistOrLiesElsewhereIsRefusedByName) {
  Store store;
  Training run(store.config);
  Engine& engine = *run.engine;
  const float outside = 0;
  const void* inside = engine.workspace().data();
  const auto push = [&](std::uint32_t block, std::uint32_t parameter, const void* data) {
    return error_of([&] { engine.push_gradient({block, parameter, data, DType::kFloat32}, engine.stream()); });
  };
  EXPECT_EQ(error_of([&] { engine.acquire(kBlocks + 1, Pass::kForward, engine.stream()); }).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(push(kBlocks + 1, 0, inside).code(), Code::kInvalidArgument);
  EXPECT_EQ(push(0, 2, inside).code(), Code::kInvalidArgument);
  EXPECT_NE(std::string(push(1, 0, &outside).what()).find("h.1.weight: its gradient does not lie in"),
            std::string::npos);
  const void* odd = engine.workspace().data() + 1;
  EXPECT_NE(std::string(push(1, 0, odd).what()).find("h.1.weight: its gradient's address"), std::string::npos);
  // Begins inside the arena and ends beyond it.
  const std::byte* end = engine.workspace().data();
  while (engine.in_hbm(end, 1)) end += 4096;
  EXPECT_NE(std::string(push(1, 0, end - 4096).what()).find("does not lie in"), std::string::npos);
  // Begins inside the workspace, in the middle of the arena, and ends beyond it.
  const std::span<std::byte> workspace = engine.workspace();
  ASSERT_TRUE(engine.in_hbm(workspace.data() + workspace.size() - 4096, kWidth * 3 * sizeof(float)));
  EXPECT_NE(std::string(push(1, 0, workspace.data() + workspace.size() - 4096).what())
                .find("h.1.weight: its gradient's 24000 bytes do not lie in memory that the engine has lent"),
            std::string::npos);
  const auto of_elements = [&](std::uint64_t elements) {
    return error_of([&] {
      engine.push_gradient({.block = 1, .parameter = 0, .data = inside, .elements = elements}, engine.stream());
    });
  };
  EXPECT_NE(std::string(of_elements(kWidth).what()).find("h.1.weight: its gradient has 2000 elements, and it has 6000"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { engine.step(std::vector<std::byte>(1 << 20)); }).code(), Code::kInvalidArgument);
  EXPECT_NE(std::string(error_of([&] { engine.step(); }).what()).find("got 0 of"), std::string::npos);
  run.trainer.run_step();
  EXPECT_EQ(testing::exported(engine), expected_bits(1));
}

TEST(EngineUse, AGradientLiesInMemoryThatIsLent) {
  constexpr std::uint64_t kBytes = 1000 * sizeof(float);
  ModelDescription flat;
  for (const char* name : {"a", "b"}) flat.blocks.push_back({name, {{.name = name, .shape = {1000}}}, kBytes});
  flat.workspace_bytes = kBytes;
  flat.activations = {{kBytes}, {kBytes}};
  for (const bool all_in_hbm : {true, false}) {
    Store store;
    if (all_in_hbm) store.config = toy_config(Placement::kHbm, Placement::kHbm, kType, "");
    store.config.weights = DType::kFloat32;
    auto engine = Engine::create(store.config, flat);
    engine->import_weights(testing::toy_weights());
    Stream& stream = engine->stream();
    const auto push = [&](std::uint32_t block, const void* data) {
      engine->push_gradient({.block = block, .parameter = 0, .data = data, .elements = 1000}, stream);
    };
    const void* released = nullptr;
    for (int step = 0; step < 3; ++step) {
      ActivationLease activation = engine->acquire_activation(0, Access::kWrite, stream);
      Lease lease = engine->acquire(1, Pass::kBackward, stream);
      push(1, step == 0 ? engine->workspace().data() : step == 1 ? activation.data() : lease.weight(0));
      const std::byte* end = activation.data() + 4;
      EXPECT_EQ(error_of([&] { push(0, end); }).code(), Code::kInvalidArgument) << "it reaches beyond its place";
      released = activation.data();
      activation.release();
      lease.release();
      EXPECT_EQ(error_of([&] { push(0, released); }).code(), Code::kInvalidArgument);
      push(0, engine->insides(0).memory.data());
      engine->step();
    }
  }
}

TEST(EngineUse, NothingIsPossibleBeforeWeightsAreThere) {
  Store store;
  auto engine = Engine::create(store.config, model());
  EXPECT_EQ(error_of([&] { engine->acquire(0, Pass::kForward, engine->stream()); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(error_of([&] { engine->step(); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(error_of([&] { testing::exported(*engine); }).code(), Code::kInvalidArgument);
  EXPECT_NO_THROW(engine->flush());
  engine->import_weights(testing::toy_weights());
  EXPECT_EQ(error_of([&] { engine->import_weights(testing::toy_weights()); }).code(), Code::kInvalidArgument);
}

TEST(EngineUse, AnExceptionOfTheCallersOwnLeavesTheEngineAsItWas) {
  for (int kind = 0; kind < 2; ++kind) {
    Store store;
    auto engine = Engine::create(store.config, model());
    const auto raise = [kind] {
      if (kind == 0) throw std::runtime_error("no more input");
      throw Error(Code::kIo, {"a file of the caller's", "is unreadable", 0, ""});
    };
    const auto source = testing::toy_weights();
    const auto broken_source = [&](std::uint32_t b, std::uint32_t p, std::uint64_t first, std::span<float> out) {
      if (b == 3) raise();
      source(b, p, first, out);
    };
    EXPECT_ANY_THROW(engine->import_weights(broken_source));
    engine->import_weights(source);
    ToyTrainer trainer{*engine, model(), kType, kMicroBatches};
    trainer.run_step();
    EXPECT_ANY_THROW(engine->export_weights(true, [&](std::uint32_t b, auto, auto, auto) {
      if (b == 2) raise();
    }));
    trainer.run_step();
    EXPECT_EQ(testing::exported(*engine), expected_bits(2));
  }
}

TEST(EngineUse, ARateComesBeforeTheGradientsOfItsStep) {
  auto engine = Engine::create(toy_config(Placement::kHbm, Placement::kHbm, kType, {}), model());
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model(), kType, kMicroBatches};
  std::size_t set = 0, refused = 0;
  trainer.between = [&] {
    try {
      engine->set_learning_rate(0.5);
      ++set;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      ++refused;
    }
  };
  EXPECT_EQ(trainer.run_step().learning_rate, 0.5);
  EXPECT_EQ(set, model().blocks.size() + 1) << "before each forward visit, and the first backward one";
  EXPECT_EQ(refused, model().blocks.size() + 1);
  for (const double rate : {-1.0, std::nan(""), HUGE_VAL}) EXPECT_THROW(engine->set_learning_rate(rate), Error) << rate;
}

TEST(EngineUse, AStepWithAllInHbmIsPredictedOnceStepsWereSeenAndWithItsUpdate) {
  auto engine = Engine::create(toy_config(Placement::kHbm, Placement::kHbm, kType, {}), model());
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model(), kType, kMicroBatches};
  EXPECT_FALSE(engine->predicted_step_seconds());
  double update = HUGE_VAL;
  for (int s = 0; s < 3; ++s) update = trainer.run_step().adam_seconds;
  ASSERT_TRUE(engine->predicted_step_seconds());
  EXPECT_GE(*engine->predicted_step_seconds(), update * (1 - 1e-9));
}

// In the middle of a step too, when the update's first tiles are on their way already.
TEST(EngineUse, FlushAndExportAreAllowedAtAnyTime) {
  Store store, crashed;
  store.config.commit_every = 100;
  std::vector<std::uint32_t> after_first;
  {
    Training run(store.config);
    int visits = 0;
    run.trainer.between = [&] {
      if (++visits % 4 == 0) testing::exported(*run.engine);
      run.engine->flush();
    };
    run.trainer.run_step();
    after_first = testing::exported(*run.engine);
    run.trainer.run_step();
    EXPECT_EQ(testing::exported(*run.engine), expected_bits(2));
    crashed.config = store.config;
    crashed.config.nvme_paths = {crashed.directory.path()};
    std::filesystem::copy(store.directory.path(), crashed.directory.path());
  }
  EXPECT_EQ(after_first, expected_bits(1));
  Training resumed(crashed.config, {.on_existing = OnExisting::kResume});
  EXPECT_EQ(resumed.engine->current_step(), 1u);  // every flush came before step 2 was done
  EXPECT_EQ(testing::exported(*resumed.engine), after_first);
}

TEST(EngineUse, AnOrderThatWasNotDescribedIsLearntInTheFirstStepAfterResumeToo) {
  const ModelDescription plain = testing::toy_model(kBlocks, kWidth, kMicroBatches, false);
  Store store;
  for (int part = 0; part < 2; ++part) {
    Training run(store.config, {.on_existing = part == 0 ? OnExisting::kRefuse : OnExisting::kResume}, plain);
    EXPECT_GT(run.trainer.run_step().unplanned_visits, 0u);
    EXPECT_EQ(run.trainer.run_step().unplanned_visits, 0u);
    if (part == 0) continue;
    EXPECT_EQ(testing::exported(*run.engine), expected_bits(4)) << "learning changes no bit";
  }
}

// The first tiles of the update are being read by then, and what the last commit holds is two steps old.
TEST(EngineUse, AVisitBehindTheLastOneSeesTheWeightsOfTheStepBefore) {
  TempStore store;
  Config config = toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat32, store.path());
  config.commit_every = 4;
  auto engine = Engine::create(config, model());
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model(), DType::kFloat32, kMicroBatches};
  trainer.run_step();
  trainer.run_step();
  std::vector<std::uint32_t> expected, seen;
  engine->export_weights(
      true, [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t, std::span<const float> values) {
        if (parameter > 0) return;
        if (block == 3) {
          for (float value : values) expected.push_back(std::bit_cast<std::uint32_t>(value));
        }
      });
  std::uint32_t visits = 0;
  trainer.between = [&] {
    if (++visits != 2 * kBlocks + 4) return;  // before step()
    Lease lease = engine->acquire(3, Pass::kForward, engine->stream());
    engine->stream().synchronize();
    const auto* weights = static_cast<const std::uint32_t*>(lease.weight(0));
    seen.assign(weights, weights + expected.size());
  };
  trainer.run_step();
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen, expected);
}

// The least host memory of the toy with large blocks, whose gradients go to NVMe then.
Config spilling(const ModelDescription& description, const std::filesystem::path& store) {
  Config config = toy_config(Placement::kNvme, Placement::kNvme, kType, store);
  config.tile_elements = 1 << 17;
  config.host_bytes = 1;
  config.host_bytes = testing::named_bytes(error_of([&] { make_plan(config, description); }));
  return config;
}

// A block that comes twice in backward does not keep the memory that others' gradients pass through.
TEST(EngineUse, ABlockThatComesTwiceInBackwardLeavesRoomForTheOthers) {
  ModelDescription description = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  description.visits.push_back({1, Pass::kBackward});  // so that the embedding, which comes twice, is updated early
  std::vector<std::uint32_t> expected;
  for (const bool least : {false, true}) {
    TempStore store;
    Config config = toy_config(Placement::kNvme, Placement::kNvme, kType, store.path());
    config.gradient_clipping = 0;
    if (least) {
      config.host_bytes = 1;
      config.host_bytes = testing::named_bytes(error_of([&] { make_plan(config, description); }));
    } else {
      config.parameters = config.states = Placement::kHbm;
    }
    Training training(config, {}, description);
    training.trainer.run_step();
    const auto bits = testing::exported(*training.engine);
    if (!least) expected = bits;
    EXPECT_EQ(bits, expected);
  }
}

TEST(EngineUse, AGradientThatIsRefusedForAnotherOnesCanComeAgain) {
  ModelDescription description = testing::toy_model(3, 300'000, 1);
  description.visits.clear();
  for (Block& block : description.blocks) {
    for (Parameter& parameter : block.parameters) parameter.pushes = 1;
  }
  std::vector<std::uint32_t> expected;
  for (const bool spilled : {false, true}) {
    TempStore store;
    Config config =
        spilled ? spilling(description, store.path()) : toy_config(Placement::kHbm, Placement::kHbm, kType, "");
    Training training(config, {}, description);
    Engine& engine = *training.engine;
    const auto push = [&](std::uint32_t block, std::uint32_t parameter) {
      auto* gradient = reinterpret_cast<float*>(engine.workspace().data());
      const std::uint64_t count = testing::count_of(description.blocks[block].parameters[parameter]);
      engine.stream().launch([=](HostWorkers&) {
        for (std::uint64_t i = 0; i < count; ++i) gradient[i] = testing::mixed(block, parameter, i);
      });
      engine.push_gradient({block, parameter, gradient, DType::kFloat32}, engine.stream());
    };
    push(1, 0);
    push(2, 0);
    if (spilled) {
      const Error error = error_of([&] { push(3, 0); });
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("go to nvme as a whole"), std::string::npos) << error.what();
    }
    push(1, 1);
    for (std::uint32_t block : {3, 0}) {
      for (std::uint32_t parameter : {0, 1}) push(block, parameter);
    }
    push(2, 1);
    engine.step();
    const auto bits = testing::exported(engine);
    if (!spilled) expected = bits;
    EXPECT_EQ(bits, expected);
  }
}

}  // namespace
}  // namespace spillway
