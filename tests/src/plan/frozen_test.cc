// Which frozen blocks a plan keeps in HBM.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "spillway/units.h"
#include "src/plan/plan.h"
#include "tests/src/random_model.h"
#include "tests/src/toy_trainer.h"
#include "tests/src/uneven_model.h"

namespace spillway {
namespace {

using testing::config_for;

// Of blocks of one size. With odd ones a larger budget may be spent on blocks that fill less of it.
TEST(PlanFrozen, MoreDeviceMemoryNeverFetchesMoreOfAModelThatIsPartlyFrozen) {
  for (const bool uneven : {false, true}) {
    for (const std::uint32_t frozen : {1u, 3u, 7u}) {
      ModelDescription model = uneven ? testing::uneven_model() : testing::toy_model(8, 1000, 2);
      for (std::uint32_t b = 0; b < frozen; ++b) {
        for (Parameter& parameter : model.blocks[b].parameters) parameter.trainable = false;
      }
      Config config = config_for(Placement::kNvme, Placement::kNvme);
      const Plan three = make_plan(config, model);
      config.hbm_bytes = three.ledger.total(Placement::kHbm);
      std::uint64_t last = UINT64_MAX, all = 0, trained = 0;
      for (const BlockPlan& block : three.blocks) {
        all += block.partition.elements * 2 + 4096;
        trained += block.partition.trainable_elements;
      }
      for (const std::uint64_t full = *config.hbm_bytes + all; *config.hbm_bytes < full;
           *config.hbm_bytes += 24 * kKiB) {
        const Plan plan = make_plan(config, model);
        std::uint64_t fetched = 0;
        const std::vector<VisitPlace> planned = planned_visits(plan, plan.hbm);
        for (std::size_t v = 0; v < planned.size(); ++v) {
          EXPECT_LE(plan.blocks[plan.visits[v].block].partition.elements * 2, plan.hbm.places[planned[v].place].bytes);
          if (planned[v].fetch) fetched += plan.blocks[plan.visits[v].block].partition.elements;
        }
        EXPECT_TRUE(uneven || fetched <= last) << frozen << " frozen, " << *config.hbm_bytes << " bytes";
        last = fetched;
      }
      EXPECT_EQ(last, trained) << "with room for all, a frozen block is not fetched at all";
    }
  }
}

// The largest has a place that no other needs; it is not fetched again because a step is over.
TEST(PlanFrozen, AnEmbeddingThatIsAloneInItsPlaceStays) {
  ModelDescription model = testing::toy_model(6, 3000, 2);
  for (Parameter& parameter : model.blocks[0].parameters) parameter.trainable = false;
  const Plan plan = make_plan(config_for(Placement::kNvme, Placement::kNvme), model);
  EXPECT_EQ(plan.hbm.places.size(), 3u);
  EXPECT_EQ(blocks_that_stay(plan), (std::vector<std::uint8_t>{1, 0, 0, 0, 0, 0, 0}));
}

// A block that may not wait for its next visit that long does not stay for it either.
TEST(PlanFrozen, ReuseDistanceHoldsFromStepToStepToo) {
  ModelDescription model;
  for (std::uint32_t b = 0; b < 6; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name, {{.name = name, .shape = {1024}, .trainable = false}}});
    model.visits.push_back({b, Pass::kForward});
  }
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.hbm_bytes = kMiB;
  for (const std::uint64_t distance : {5 * 1024, 5 * 1024 + 1}) {
    config.knobs.max_reuse_distance = distance;
    const auto stay = blocks_that_stay(make_plan(config, model));
    EXPECT_EQ(std::ranges::count(stay, 1), distance > 5 * 1024 ? 6 : 0) << distance;
  }
}

}  // namespace
}  // namespace spillway
