// What a step moves and when it is committed, and what a resumed run goes on with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>

#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/src/layout_cases.h"
#include "tests/src/named_budget.h"

namespace spillway {
namespace {

using testing::layout_case;
using testing::LayoutCase;
using testing::LayoutRun;
using testing::TempStore;
using testing::ToyTrainer;

TEST(Engine, AStoreOfAnotherOptimizerIsRefused) {
  LayoutRun run(layout_case("nvme"), DType::kBFloat16, [](Config& c) { c.optimizer.kind = OptimizerKind::kLion; });
  run.config.optimizer.kind = OptimizerKind::kAdagrad;  // as many bytes, another meaning
  try {
    run.open(OnExisting::kResume);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("optimizer"), std::string::npos) << error.what();
  }
}

TEST(Engine, TrainsOnAfterResumeAsIfNothingHadHappened) {
  LayoutCase layout = layout_case("nvme");
  const auto expected = LayoutRun(layout, DType::kBFloat16).until(6).bits;
  layout.rates = {2, 1};
  LayoutRun run(layout, DType::kBFloat16);
  for (std::uint64_t part = 0; part < 3; ++part) {
    if (part > 0) {
      run.open(OnExisting::kResume);
      std::uint64_t blob = 0;
      ASSERT_EQ(run.engine->blob().size(), sizeof blob);
      std::memcpy(&blob, run.engine->blob().data(), sizeof blob);
      EXPECT_EQ(blob, part * 2);
    }
    EXPECT_EQ(run.engine->current_step(), part * 2);
    EXPECT_EQ(run.trainer->run_step().durable_step, part * 2) << "a step is committed during the next one";
    EXPECT_EQ(run.trainer->run_step().durable_step, part * 2 + 1);
  }
  EXPECT_EQ(testing::exported(*run.engine), expected);
}

TEST(Engine, TilesInMemoryAreCommittedByFlushAndResumed) {
  const auto expected = LayoutRun(layout_case("host"), DType::kBFloat16).until(4).bits;
  LayoutRun run(
      layout_case("host"), DType::kBFloat16, [](Config& config) { config.commit_every = 100; }, true);
  run.trainer->run_step();
  EXPECT_EQ(run.trainer->run_step().durable_step, 0u);
  run.engine->flush();
  run.open(OnExisting::kResume);
  EXPECT_EQ(run.engine->current_step(), 2u);
  EXPECT_EQ(run.until(4).bits, expected);
}

// Forward takes its weights from the update of the step before: with room for all blocks, what a step reads is what
// the update reads, and nothing is read twice. A gradient that does not fit host memory is written once and read once.
class Traffic : public ::testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(Traffic, OfAStepIsWhatTheUpdateNeedsWhenAllBlocksFit) {
  const auto [type, spilled] = GetParam();
  TempStore store;
  const ModelDescription model = testing::toy_model(2, 200'000, 1);  // three blocks, as many places
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, type, store.path());
  config.speculative_blocks.reset();
  config.tile_elements = 1 << 16;
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

// A gradient that is used up as soon as it is complete needs no memory of its own, and forward, backward and the update
// read what they need, once each: 2, 2 and 12 bytes a bf16 parameter.
TEST(Engine, WithoutClippingTheUpdateIsMadeInsideBackward) {
  TempStore store;
  const ModelDescription model = testing::toy_model(6, 3000, 1);
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  const auto gradients = [](const Engine& engine) {
    std::uint64_t sum = 0;
    for (const Reservation& line : engine.ledger().reservations) {
      if (line.tier == Placement::kHost && line.purpose == "gradients") sum += line.bytes;
    }
    return sum;
  };
  const std::uint64_t stored = gradients(*Engine::create(config, model));
  config.gradient_clipping = 0;
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
