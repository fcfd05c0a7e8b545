// A run moves the bytes that its schedule says.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/engine/clip_guess.h"
#include "src/plan/schedule.h"
#include "tests/src/named_budget.h"
#include "tests/src/plan/schedule_check.h"
#include "tests/src/toy_trainer.h"
#include "tests/src/uses_between_visits.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

using testing::TempStore;
using testing::ToyTrainer;
using testing::UsesBetweenVisits;

constexpr std::uint32_t kBlocks = 8, kMicroBatches = 2;
constexpr std::uint32_t kHeld = 2, kParts = 2 * kBlocks + 4;  // uses of activations: at a time; calls of `between`
constexpr int kSteps = 8;

// Runs of steps cut through what is read ahead and written afterwards: of the two cuts each can move what is in flight.
void expect_near(const char* link, std::uint64_t moved, std::uint64_t planned, std::uint64_t in_flight) {
  const std::uint64_t expected = kSteps * planned;
  EXPECT_LE(moved, expected + in_flight) << link;
  EXPECT_GE(moved + in_flight, expected) << link;
  EXPECT_TRUE(in_flight * 4 < expected || moved == expected) << link << ": too little moves to tell";
}

Plan compare(Placement parameters, Placement states, const std::function<void(Config&)>& change,
             const ModelDescription& model = testing::toy_model(kBlocks, 60'000, kMicroBatches)) {
  TempStore store;
  Config config = testing::toy_config(parameters, states, DType::kBFloat16, store.path());
  config.tile_elements = 64 * kKiB;
  config.commit_every = 1;
  change(config);
  const Plan plan = make_plan(config, model);
  Plan scheduled = plan;
  for (const std::uint32_t block : speculated_blocks(plan, *config.speculative_blocks)) {
    scheduled.blocks[block].early = true;
  }
  const ScheduleInput input = schedule_input(scheduled, {}, {});
  const Schedule schedule = make_schedule(input);
  testing::check_schedule(input, schedule);

  auto engine = Engine::create(config, model);
  engine->import_weights(testing::toy_weights());
  ToyTrainer trainer{*engine, model, config.weights, kMicroBatches};
  trainer.in_turn = std::ranges::count(model.visits, Visit{0, Pass::kForward}) > 1;
  UsesBetweenVisits uses(*engine, model, kHeld, kParts);
  trainer.between = [&] { uses.run_part(); };
  for (int step = 0; step < 4; ++step) trainer.run_step();  // guesses begin after the second
  ScheduleTraffic moved;
  for (int step = 0; step < kSteps; ++step) {
    const StepReport report = trainer.run_step();
    moved.nvme_read += report.nvme_read_bytes;
    moved.nvme_write += report.nvme_write_bytes;
    moved.h2d += report.h2d_bytes;
    moved.d2h += report.d2h_bytes;
  }
  const std::uint64_t records = plan.has_store ? 2 * plan.host.record.bytes : 0;  // two copies a commit
  const std::uint64_t tiles = plan.host.buffers.bytes, chunks = plan.host.chunks.bytes + plan.host.spill_chunks.bytes;
  std::uint64_t places = 0;
  for (const Region& place : plan.hbm.places) places += place.bytes;
  expect_near("read", moved.nvme_read, schedule.traffic.nvme_read, tiles + std::min(chunks, places));
  expect_near("write", moved.nvme_write, schedule.traffic.nvme_write + records, tiles);
  expect_near("h2d", moved.h2d, schedule.traffic.h2d, places);
  EXPECT_EQ(moved.d2h, kSteps * schedule.traffic.d2h);
  return plan;
}

void nothing(Config&) {}

TEST(ScheduleEngine, MovesThePlannedBytesWhateverLivesWhere) {
  compare(Placement::kNvme, Placement::kNvme, nothing);
  compare(Placement::kHost, Placement::kNvme, nothing);
  compare(Placement::kNvme, Placement::kHost, nothing);
  compare(Placement::kHost, Placement::kHost, nothing);
  compare(Placement::kHbm, Placement::kNvme, nothing);
  compare(Placement::kHbm, Placement::kHost, nothing);
}

TEST(ScheduleEngine, MovesThePlannedBytesOfReducedStates) {
  for (const MomentFormat moments : kReducedFormats) {
    SCOPED_TRACE(name_of(moments));
    const auto reduce = [moments](Config& config) { config.moments = moments; };
    const Plan plan = compare(Placement::kNvme, Placement::kNvme, reduce);
    compare(Placement::kHost, Placement::kNvme, reduce);
    compare(Placement::kHbm, Placement::kHost, reduce);
    std::uint64_t states = 0, vectors = 0, matrices = 0;
    for (const TilePlace& tile : plan.tile_places) {
      states += payload_bytes(tile.shape, Part::kStates);
      (tile.shape.states.empty() ? vectors : matrices) += tile.shape.count;
    }
    EXPECT_EQ(states * 8, vectors * 80 + matrices * (moments == MomentFormat::kInt8 ? 33 : 48));
    EXPECT_GT(matrices, vectors);
  }
}

TEST(ScheduleEngine, MovesThePlannedBytesWithoutClipping) {
  const Plan plan = compare(Placement::kNvme, Placement::kNvme, [](Config& config) { config.gradient_clipping = 0; });
  EXPECT_TRUE(plan.early_blocks);
}

TEST(ScheduleEngine, MovesThePlannedBytesOfGuesses) {
  for (const std::uint32_t blocks : {1u, 3u, kBlocks}) {
    const Plan plan = compare(Placement::kNvme, Placement::kNvme, [blocks](Config& config) {
      config.gradient_clipping = 1e9;
      config.speculative_blocks = blocks;
    });
    EXPECT_EQ(std::ranges::count_if(plan.blocks, &BlockPlan::speculative), kBlocks);
  }
}

TEST(ScheduleEngine, MovesThePlannedBytesOfSpilledGradients) {
  const Plan plan = compare(Placement::kNvme, Placement::kNvme, [](Config& config) { config.host_bytes = 8 * kMiB; });
  EXPECT_GT(plan.spill_bytes, 0u);
}

TEST(ScheduleEngine, MovesThePlannedBytesWithAPlaceLessAndTwoMore) {
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  for (const int more : {-1, 2}) {
    const Plan plan = compare(Placement::kNvme, Placement::kNvme, [&](Config& config) {
      const Plan usual = make_plan(config, model);
      config.hbm_bytes = usual.ledger.total(Placement::kHbm) + more * usual.hbm.places.back().bytes;
    });
    EXPECT_EQ(plan.hbm.places.size(), 3u + more);
  }
}

TEST(ScheduleEngine, MovesThePlannedBytesOfFrozenBlocksThatStay) {
  ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  for (std::uint32_t b = 1; b < 5; ++b) {
    for (Parameter& parameter : model.blocks[b].parameters) parameter.trainable = false;
  }
  for (const std::uint64_t more : {0, 2, 4}) {
    const Plan plan = compare(
        Placement::kNvme, Placement::kNvme,
        [&](Config& config) {
          const Plan usual = make_plan(config, model);
          config.hbm_bytes = usual.ledger.total(Placement::kHbm) + more * usual.hbm.places.back().bytes;
        },
        model);
    EXPECT_EQ(std::ranges::count(blocks_that_stay(plan), 1), static_cast<std::ptrdiff_t>(more));
  }
}

TEST(ScheduleEngine, MovesThePlannedBytesOfAccumulators) {
  const ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches, true, true);
  for (const std::uint64_t more : {0, 3}) {  // places and those that stay
    const Plan plan = compare(
        Placement::kNvme, Placement::kNvme,
        [&](Config& config) {
          const std::uint64_t layer = make_plan(config, model).blocks[1].accumulator->bytes;
          config.hbm_bytes = 1;
          try {
            make_plan(config, model);
          } catch (const Error& error) {
            config.hbm_bytes = testing::named_bytes(error) + more * layer;
          }
        },
        model);
    EXPECT_EQ(plan.hbm.accumulators.empty(), false);
  }
}

TEST(ScheduleEngine, MovesThePlannedBytesOfActivations) {
  ModelDescription model = testing::toy_model(kBlocks, 60'000, kMicroBatches);
  model.activation_uses = testing::transformer_uses(kBlocks, 4);
  model.activations.assign((kBlocks + 1) * 4, {.bytes = 100'000});
  model.activations_held = kHeld;
  for (const bool on_nvme : {false, true}) {
    const Plan plan = compare(
        Placement::kNvme, Placement::kNvme,
        [&](Config& config) {
          const Plan roomy = make_plan(config, model);
          config.hbm_bytes = roomy.ledger.total(Placement::kHbm) - 2 * kMiB;
          if (!on_nvme) return;
          config.host_bytes = 1;
          try {
            make_plan(config, model);
          } catch (const Error& error) {
            config.host_bytes = testing::named_bytes(error);
          }
        },
        model);
    EXPECT_FALSE(plan.activations.uses.empty());
    EXPECT_EQ(plan.nvme.activations.bytes > 0, on_nvme);
  }
}

}  // namespace
}  // namespace spillway
