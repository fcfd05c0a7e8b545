#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/src/named_budget.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;
using testing::ToyTrainer;

constexpr std::uint32_t kBlocks = 4, kMicroBatches = 2;
constexpr std::uint64_t kWidth = 3000;
// Of the runs that are compared layout by layout; SPILLWAY_STEPS sets fewer, where each takes ten times as long.
const int kSteps = std::getenv("SPILLWAY_STEPS") ? std::atoi(std::getenv("SPILLWAY_STEPS")) : 5;

struct Layout {
  std::string name;
  Placement parameters = Placement::kHbm, states = Placement::kHbm;
  std::uint64_t tile_elements = 4 << 20;
  unsigned threads = 2;
  IoEngineKind io = IoEngineKind::kAuto;
  bool tight = false;  // the smallest budgets that the plan accepts
  bool poison = false;
  bool visits = true;
  std::vector<double> rates = {1};  // of each nvme path
};

Config config_for(const Layout& layout, DType type, const std::filesystem::path& store) {
  Config config;
  config.weights = type;
  config.loss_scale = testing::kOverflowing;
  config.gradient_clipping = 1.0;
  config.optimizer = {.learning_rate = 1e-2, .weight_decay = 0.01};
  config.parameters = layout.parameters;
  config.states = layout.states;
  config.tile_elements = layout.tile_elements;
  config.threads = layout.threads;
  config.io_engine = layout.io;
  if (layout.states == Placement::kNvme || layout.parameters == Placement::kNvme) {
    for (std::size_t i = 0; i < layout.rates.size(); ++i) config.nvme_paths.push_back(store / std::to_string(i));
    config.nvme_rates = layout.rates;
  }
  return config;
}

// The smallest budgets: those that the refusals themselves name, found as a user would.
void tighten(Config& config, const ModelDescription& model) {
  config.hbm_bytes = 1;
  config.host_bytes = 1;
  for (int i = 0; i < 2; ++i) {
    try {
      Engine::create(config, model, {.on_existing = OnExisting::kReplace});
      return;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), Code::kDoesNotFit) << error.what();
      testing::named_setting(config, error) = testing::named_bytes(error);
    }
  }
}

using Change = std::function<void(Config&)>;

std::vector<std::uint32_t> train(const Layout& layout, DType type, int steps = kSteps, const Change& change = {}) {
  TempStore store;
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches, layout.visits);
  Config config = config_for(layout, type, store.path());
  if (change) change(config);
  if (layout.tight) tighten(config, model);
  auto engine = Engine::create(config, model, {.on_existing = OnExisting::kReplace, .poison_released = layout.poison});
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, type, kMicroBatches};
  for (int s = 0; s < steps; ++s) {
    const StepReport report = trainer.run_step();
    EXPECT_NE(std::isfinite(report.gradient_norm), report.skipped);
    if (layout.visits || s > 0) {
      EXPECT_EQ(report.unplanned_visits, 0u) << layout.name;
    }
  }
  return testing::exported(*engine);
}

std::vector<Layout> layouts() {
  return {
      {.name = "host", .parameters = Placement::kHost, .states = Placement::kHost},
      {.name = "weights in hbm, states in host", .states = Placement::kHost},
      {.name = "weights in hbm, states on nvme", .states = Placement::kNvme},
      {.name = "weights in host, states on nvme", .parameters = Placement::kHost, .states = Placement::kNvme},
      {.name = "weights on nvme, states in host", .parameters = Placement::kNvme, .states = Placement::kHost},
      {.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme},
      {.name = "nvme, tight", .parameters = Placement::kNvme, .states = Placement::kNvme, .tight = true},
      {.name = "nvme, small tiles, tight, 1 thread, threads engine",
       .parameters = Placement::kNvme,
       .states = Placement::kNvme,
       .tile_elements = 4096,
       .threads = 1,
       .io = IoEngineKind::kThreads,
       .tight = true},
      {.name = "nvme, small tiles, 5 threads, poisoned",
       .parameters = Placement::kNvme,
       .states = Placement::kNvme,
       .tile_elements = 5120,
       .threads = 5,
       .poison = true},
      {.name = "two nvme paths, libaio",
       .parameters = Placement::kNvme,
       .states = Placement::kNvme,
       .tile_elements = 8192,
       .io = IoEngineKind::kLibaio,
       .rates = {3, 1}},
      {.name = "three nvme paths, tight",
       .parameters = Placement::kNvme,
       .states = Placement::kNvme,
       .tight = true,
       .rates = {1, 2, 1}},
      {.name = "nvme, visits recorded", .parameters = Placement::kNvme, .states = Placement::kNvme, .visits = false},
  };
}

class SameBits : public ::testing::TestWithParam<DType> {};

TEST_P(SameBits, WhereverATensorLives) {
  const auto expected = train({.name = "hbm"}, GetParam());
  for (const Layout& layout : layouts()) EXPECT_EQ(train(layout, GetParam()), expected) << layout.name;
}

// Without clipping, what lies on NVMe is updated inside backward.
void without_clipping(Config& config) { config.gradient_clipping = 0; }

TEST_P(SameBits, WhereverATensorLivesWithoutClipping) {
  const auto expected = train({.name = "hbm"}, GetParam(), kSteps, without_clipping);
  EXPECT_NE(expected, train({.name = "hbm"}, GetParam()));
  for (const Layout& layout : layouts()) {
    EXPECT_EQ(train(layout, GetParam(), kSteps, without_clipping), expected) << layout.name;
  }
}

INSTANTIATE_TEST_SUITE_P(, SameBits, ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

Change optimizer_of(OptimizerKind kind) {
  return [kind](Config& config) {
    config.optimizer.kind = kind;
    config.optimizer.momentum = 0.9;
    config.no_decay = true;  // the toy's norm and biases
    config.parameter_groups = {{.parameters = {"h.2.*", "h.3.bias"}, .learning_rate = 5e-3, .weight_decay = {}},
                               {.parameters = {"wte"}, .learning_rate = {}, .weight_decay = 0.1}};
  };
}

class SameBitsOf : public ::testing::TestWithParam<OptimizerKind> {};

// Every optimizer, with parameter groups whose ends lie inside tiles.
TEST_P(SameBitsOf, TheOptimizerWhereverATensorLives) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Change change = optimizer_of(GetParam());
    const auto expected = train({.name = "hbm"}, type, kSteps, change);
    for (const Layout& layout : layouts()) {
      const bool chosen = layout.tight || layout.parameters != layout.states;
      if (chosen) {
        EXPECT_EQ(train(layout, type, kSteps, change), expected) << layout.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SameBitsOf,
                         ::testing::Values(OptimizerKind::kAdam, OptimizerKind::kAdagrad, OptimizerKind::kLion,
                                           OptimizerKind::kSgd),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(Engine, AGroupOfAllParametersIsTheOptimizersOwnValues) {
  const Layout nvme{.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 4096};
  const auto grouped = train(nvme, DType::kBFloat16, 3, [](Config& config) {
    config.parameter_groups = {{.parameters = {"*"}, .learning_rate = 3e-3, .weight_decay = 0.2}};
  });
  EXPECT_EQ(grouped, train(nvme, DType::kBFloat16, 3, [](Config& config) {
              config.optimizer.learning_rate = 3e-3;
              config.optimizer.weight_decay = 0.2;
            }));
  EXPECT_NE(grouped, train(nvme, DType::kBFloat16, 3));
  EXPECT_NE(train(nvme, DType::kBFloat16, 3, [](Config& config) { config.no_decay = true; }),
            train(nvme, DType::kBFloat16, 3));
}

// The rates that a schedule would give, given by the caller step by step; also to blocks that are updated in backward.
TEST(Engine, AGivenRateTrainsLikeOneOfASchedule) {
  Config scheduled;
  scheduled.schedule.kind = ScheduleKind::kWarmup;
  scheduled.schedule.warmup_max_lr = 1e-2;
  scheduled.schedule.warmup_steps = 3;
  scheduled.schedule.logarithmic_warmup = false;
  for (const double clipping : {0.0, 1.0}) {
    std::vector<std::uint32_t> bits[2];
    for (const bool given : {false, true}) {
      TempStore store;
      const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches);
      Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat32, store.path());
      config.gradient_clipping = clipping;
      config.parameter_groups = {{.parameters = {"h.2.*"}, .learning_rate = 5e-3, .weight_decay = {}}};
      if (!given) config.schedule = scheduled.schedule;
      auto engine = Engine::create(config, model);
      engine->import_weights(testing::toy_weights());
      ToyTrainer trainer{*engine, model, DType::kFloat32, kMicroBatches};
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const double rate = learning_rate(scheduled, step);
        if (given) engine->set_learning_rate(rate);
        EXPECT_EQ(trainer.run_step().learning_rate, rate);
      }
      bits[given] = testing::exported(*engine);
    }
    EXPECT_EQ(bits[0], bits[1]);
  }
}

TEST(Engine, AStoreOfAnotherOptimizerIsRefused) {
  const Layout nvme{.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 4096};
  TempStore store;
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  Config config = config_for(nvme, DType::kBFloat16, store.path());
  config.optimizer.kind = OptimizerKind::kLion;
  Engine::create(config, model)->import_weights(testing::toy_weights());
  config.optimizer.kind = OptimizerKind::kAdagrad;  // as many bytes, another meaning
  try {
    Engine::create(config, model, {.on_existing = OnExisting::kResume});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("optimizer"), std::string::npos) << error.what();
  }
}

TEST(Engine, TrainsOnAfterResumeAsIfNothingHadHappened) {
  const Layout nvme{.name = "two nvme paths",
                    .parameters = Placement::kNvme,
                    .states = Placement::kNvme,
                    .tile_elements = 4096,
                    .rates = {2, 1}};
  const auto expected = train(nvme, DType::kBFloat16, 6);
  TempStore store;
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  const Config config = config_for(nvme, DType::kBFloat16, store.path());
  for (int part = 0; part < 3; ++part) {
    auto engine = Engine::create(config, model, {.on_existing = part == 0 ? OnExisting::kRefuse : OnExisting::kResume});
    if (part == 0) engine->import_weights(testing::toy_weights());
    EXPECT_EQ(engine->current_step(), part * 2u);
    if (part > 0) {
      std::uint64_t blob = 0;
      ASSERT_EQ(engine->blob().size(), sizeof blob);
      std::memcpy(&blob, engine->blob().data(), sizeof blob);
      EXPECT_EQ(blob, part * 2u);
    }
    ToyTrainer trainer{*engine, model, DType::kBFloat16, kMicroBatches};
    EXPECT_EQ(trainer.run_step().durable_step, part * 2u) << "a step is committed during the next one";
    EXPECT_EQ(trainer.run_step().durable_step, part * 2u + 1);
    if (part == 2) {
      EXPECT_EQ(testing::exported(*engine), expected);
    }
  }
}

// Forward takes its weights from the update of the step before: with room for all blocks, what a step reads is what
// the update reads, and nothing is read twice. A gradient that does not fit host memory is written once and read once.
class Traffic : public ::testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(Traffic, OfAStepIsWhatTheUpdateNeedsWhenAllBlocksFit) {
  const auto [type, spilled] = GetParam();
  TempStore store;
  const ModelDescription model = testing::toy_model(2, 200'000, 1);  // three blocks, as many places
  const Layout nvme{
      .name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 1 << 16};
  Config config = config_for(nvme, type, store.path());
  if (spilled) {
    config.host_bytes = 1;
    try {
      Engine::create(config, model);
    } catch (const Error& error) {
      config.host_bytes = testing::named_bytes(error);
    }
  }
  const Plan plan = make_plan(config, model);
  double weights = 0, states = 0, gradients = 0, payload = 0, largest = 0;
  for (std::size_t t = 0; t < plan.tiles.size(); ++t) {
    const TileShape& shape = plan.tile_places[t].shape;
    weights += static_cast<double>(extent_bytes(shape, Part::kWeights));
    states += static_cast<double>(extent_bytes(shape, Part::kStates));
    payload += static_cast<double>(payload_bytes(shape, Part::kWeights));
    gradients += static_cast<double>(plan.tiles[t].gradient.bytes);
    largest = std::max(largest, static_cast<double>(extent_bytes(shape, Part::kStates)));
  }
  EXPECT_EQ(gradients > 0, spilled);
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, type, 1};
  // The first tiles of the next update may have been read ahead, and counted, or not.
  const double ahead = plan.host.buffers_count * 2 * largest;
  const StepReport first = trainer.run_step();
  EXPECT_EQ(static_cast<double>(first.nvme_write_bytes), gradients);
  EXPECT_NEAR(static_cast<double>(first.nvme_read_bytes), weights, ahead) << "fetches";
  double read = 0;
  const int steps = 4;
  for (int step = 0; step < steps; ++step) {
    const StepReport report = trainer.run_step();
    read += static_cast<double>(report.nvme_read_bytes);
    const double manifest = 2.0 * static_cast<double>(plan.host.record.bytes);
    EXPECT_EQ(static_cast<double>(report.nvme_write_bytes), weights + states + gradients + manifest);
    EXPECT_EQ(static_cast<double>(report.h2d_bytes), payload);
  }
  EXPECT_NEAR(read, steps * (weights + states + gradients), ahead) << "every tile, once";
}

INSTANTIATE_TEST_SUITE_P(, Traffic,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "GradientsOnNvme" : "GradientsInHost");
                         });

// Given visits or recorded ones, whose gradients come one block after the other or not; what is spilled is not updated
// inside backward.
TEST(Engine, SpilledGradientsHaveTheSameBits) {
  for (const double clipping : {1.0, 0.0}) {
    for (const bool visits : {true, false}) {
      const ModelDescription model = testing::toy_model(3, 150'000, 2, visits);
      std::vector<std::uint32_t> expected;
      for (const bool tight : {false, true}) {
        TempStore store;
        Layout layout{.name = "hbm"};
        if (tight) {
          layout.parameters = layout.states = Placement::kNvme;
          layout.tile_elements = 100 * 1024;
        }
        Config config = config_for(layout, DType::kBFloat16, store.path());
        config.gradient_clipping = clipping;
        if (tight) tighten(config, model);
        auto engine = Engine::create(config, model, {.on_existing = OnExisting::kReplace});
        engine->import_weights(testing::toy_weights());
        ToyTrainer trainer{*engine, model, DType::kBFloat16, 2};
        for (int step = 0; step < 3; ++step) trainer.run_step();
        if (!tight) {
          expected = testing::exported(*engine);
          continue;
        }
        EXPECT_GT(make_plan(config, model).spill_bytes, 0u);
        EXPECT_EQ(testing::exported(*engine), expected) << "clipping " << clipping << ", visits " << visits;
      }
    }
  }
}

TEST(Engine, TilesInMemoryAreCommittedByFlushAndResumed) {
  const Layout mixed{.name = "host", .parameters = Placement::kHost, .states = Placement::kHost, .tile_elements = 8192};
  const auto expected = train(mixed, DType::kBFloat16, 4);
  TempStore store;
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  Config config = config_for(mixed, DType::kBFloat16, store.path());
  config.nvme_paths = {store.path()};
  config.commit_every = 100;
  {
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model, DType::kBFloat16, kMicroBatches};
    trainer.run_step();
    EXPECT_EQ(trainer.run_step().durable_step, 0u);
    engine->flush();
  }
  auto engine = Engine::create(config, model, {.on_existing = OnExisting::kResume});
  EXPECT_EQ(engine->current_step(), 2u);
  ToyTrainer trainer{*engine, model, DType::kBFloat16, kMicroBatches};
  trainer.run_step();
  trainer.run_step();
  EXPECT_EQ(testing::exported(*engine), expected);
}

TEST(Engine, WhereNothingIsTrainedNoPlaceForStatesIsNeeded) {
  ModelDescription frozen = testing::toy_model(3, 500, 1);
  for (Block& block : frozen.blocks)
    for (Parameter& parameter : block.parameters) parameter.trainable = false;
  const TempStore store;
  for (const Placement weights : {Placement::kNvme, Placement::kHost, Placement::kHbm}) {
    Config config = testing::toy_config(weights, Placement::kHbm, DType::kFloat32, store.path());
    auto engine = Engine::create(config, frozen, {.on_existing = OnExisting::kReplace});
    engine->import_weights(testing::toy_weights());
    for (std::uint32_t block = 0; block < frozen.blocks.size(); ++block) {
      const Lease lease = engine->acquire(block, Pass::kForward, engine->stream());
      engine->stream().synchronize();
      EXPECT_EQ(static_cast<const float*>(lease.weight(0))[1], 0.1f * testing::mixed(block, 0, 1));
    }
  }
}

// Without clipping most of the model is updated by the time that the NaN comes.
class NonFinite : public ::testing::TestWithParam<double> {};

TEST_P(NonFinite, GradientIsRefusedNamedAndChangesNothing) {
  const auto clipping = [](Config& config) { config.gradient_clipping = GetParam(); };
  const Layout nvme{.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 4096};
  const auto expected = train(nvme, DType::kBFloat16, 3, clipping);
  TempStore store;
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, kMicroBatches);
  Config config = config_for(nvme, DType::kBFloat16, store.path());
  clipping(config);
  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, DType::kBFloat16, kMicroBatches, 2};
  trainer.run_step();
  try {
    trainer.run_step();
    FAIL() << "a NaN went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kNonFinite);
    EXPECT_NE(std::string(error.what()).find("h.1.weight of block h.1"), std::string::npos) << error.what();
  }
  EXPECT_EQ(engine->current_step(), 1u);
  trainer.poison_step = 0;
  trainer.run_step();
  trainer.run_step();
  EXPECT_EQ(testing::exported(*engine), expected);
}

INSTANTIATE_TEST_SUITE_P(, NonFinite, ::testing::Values(1.0, 0.0), [](const auto& info) {
  return std::string(info.param > 0 ? "WithClipping" : "WithoutClipping");
});

// The blocks behind the NaN come to memory of different sizes, and none of them is updated.
TEST(Engine, BlocksOfAnySizeComeBehindAGradientThatIsNotFinite) {
  ModelDescription model = testing::toy_model(6, kWidth, 1);
  model.blocks[1].parameters[0].shape[0] *= 2;
  model.workspace_bytes *= 2;
  const Layout nvme{.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 4096};
  std::vector<std::uint32_t> expected;
  for (const bool poisoned : {false, true}) {
    TempStore store;
    Config config = config_for(nvme, DType::kBFloat16, store.path());
    without_clipping(config);
    const Plan plan = make_plan(config, model);
    ASSERT_LT(plan.host.passing.back().bytes, plan.blocks[1].gradient.bytes);
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    ToyTrainer trainer{*engine, model, DType::kBFloat16, 1};
    trainer.poison_block = 6;
    trainer.poison_step = poisoned ? 1 : 0;
    if (poisoned) {
      EXPECT_THROW(trainer.run_step(), Error);
    }
    trainer.poison_step = 0;
    trainer.run_step();
    trainer.run_step();
    const auto bits = testing::exported(*engine);
    if (poisoned) {
      EXPECT_EQ(bits, expected);
    }
    expected = bits;
  }
}

// A gradient that is used up as soon as it is complete needs no memory of its own, and forward, backward and the update
// read what they need, once each: 2, 2 and 12 bytes a bf16 parameter.
TEST(Engine, WithoutClippingTheUpdateIsMadeInsideBackward) {
  TempStore store;
  const ModelDescription model = testing::toy_model(6, kWidth, 1);
  const Layout nvme{.name = "nvme", .parameters = Placement::kNvme, .states = Placement::kNvme, .tile_elements = 4096};
  Config config = config_for(nvme, DType::kBFloat16, store.path());
  const auto gradients = [](const Engine& engine) {
    std::uint64_t sum = 0;
    for (const Reservation& line : engine.ledger().reservations) {
      if (line.tier == Placement::kHost && line.purpose == "gradients") sum += line.bytes;
    }
    return sum;
  };
  const std::uint64_t stored = gradients(*Engine::create(config, model));
  without_clipping(config);
  auto engine = Engine::create(config, model);
  EXPECT_LT(gradients(*engine), stored * 3 / 4) << "the embedding and three of six layers";
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, DType::kBFloat16, 1};
  trainer.run_step();
  const std::uint64_t before = trainer.run_step().nvme_write_bytes;
  bool written_in_backward = false;
  int visits = 0;
  trainer.between = [&] {
    if (++visits != 15) return;  // before the embedding's last visit
    try {
      testing::exported(*engine);
      ADD_FAILURE() << "half a step was exported";
    } catch (const Error& error) {
      written_in_backward = std::string(error.what()).find("a step is under way") != std::string::npos;
    }
  };
  // The last writes of a step may be counted in the next.
  EXPECT_NEAR(static_cast<double>(trainer.run_step().nvme_write_bytes), static_cast<double>(before), 16 * 65536);
  EXPECT_TRUE(written_in_backward);
}

}  // namespace
}  // namespace spillway
