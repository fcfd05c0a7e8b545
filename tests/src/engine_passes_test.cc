// Forward passes between steps, of an evaluation or of tokens: what fits HBM is fetched once, the rest once a pass, as
// the plan says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "spillway/units.h"
#include "src/plan/passes.h"
#include "tests/aio/temp_files.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;

constexpr std::uint32_t kBlocks = 8;
constexpr std::uint64_t kWidth = 64 * kKiB;

// One after another, and the blocks of a tied head once more at the end.
void pass(Engine& engine) {
  for (std::uint32_t b = 0; b <= kBlocks; ++b) engine.acquire(b, Pass::kForward, engine.stream());
}

std::uint64_t bytes_of_step(testing::ToyTrainer& trainer, std::uint64_t passes) {
  for (; passes > 0; --passes) pass(trainer.engine);
  return trainer.run_step().nvme_read_bytes;
}

Config with_room_for(std::uint64_t more, const ModelDescription& model, const TempStore& store) {
  Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
  config.tile_elements = 32 * kKiB;
  config.commit_every = 1;
  const Plan plan = make_plan(config, model);
  config.hbm_bytes = plan.ledger.total(Placement::kHbm) + more * plan.hbm.places.back().bytes;
  config.host_bytes = plan.ledger.total(Placement::kHost);
  return config;
}

TEST(EnginePasses, FetchWhatIsPlannedAndNoMore) {
  const ModelDescription model = testing::toy_model(kBlocks, kWidth, 1);
  std::uint64_t before = UINT64_MAX;
  for (const std::uint64_t more : {0u, 2u, 4u, kBlocks}) {
    TempStore store;
    const Config config = with_room_for(more, model, store);
    const Plan plan = make_plan(config, model);
    const PassTraffic planned = pass_traffic(plan);
    EXPECT_LT(planned.nvme_read, before) << "more room, fewer bytes";
    EXPECT_LE(planned.fetched, planned.nvme_read) << "all of it, in extents";
    if (more == kBlocks) {
      EXPECT_EQ(planned.nvme_read, 0u);
    }
    before = planned.nvme_read;
    const auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, 1};
    std::uint64_t without = 0;
    for (int step = 0; step < 3; ++step) without = std::max(without, bytes_of_step(trainer, 0));
    constexpr std::uint64_t kPasses = 40;
    const std::uint64_t read = bytes_of_step(trainer, kPasses);
    // Until the fixed set is there, two passes go by; and which step reads the first tiles of an update is a matter of
    // time.
    const std::uint64_t ahead = plan.host.buffers_count * config.tile_elements * 16;
    const std::uint64_t least = kPasses * planned.nvme_read, slack = 2 * planned.weights + ahead;
    EXPECT_LE(read, without + least + slack) << more;
    EXPECT_GE(read + slack, without + least) << more;
  }
}

TEST(EnginePasses, LeaveTheBitsOfStepsAlone) {
  const ModelDescription model = testing::toy_model(kBlocks, 3000, 2);
  const auto train = [&](Placement placement, std::uint64_t more, int passes) {
    TempStore store;
    Config config = testing::toy_config(placement, placement, DType::kBFloat16, store.path());
    if (placement == Placement::kNvme) {
      const Plan usual = make_plan(config, model);
      config.hbm_bytes = usual.ledger.total(Placement::kHbm) + more * usual.hbm.places.back().bytes;
    }
    const auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, config.weights, 2};
    for (int step = 0; step < 4; ++step) {
      for (int p = 0; p < passes; ++p) {
        if (p % 2 == 1) engine->acquire(0, Pass::kForward, engine->stream());  // one that is given up
        pass(*engine);
      }
      trainer.run_step();
    }
    return testing::exported(*engine);
  };
  const auto bits = train(Placement::kHbm, 0, 0);
  for (const std::uint64_t more : {0u, 2u, 4u, kBlocks}) {
    for (const int passes : {1, 3}) EXPECT_EQ(train(Placement::kNvme, more, passes), bits) << more << ' ' << passes;
  }
}

}  // namespace
}  // namespace spillway
