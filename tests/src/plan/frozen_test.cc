// Which frozen blocks a plan keeps in HBM.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "spillway/error.h"
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

// Adapters: leased while the blocks that they belong to are visited.
ModelDescription model_with_adapters() {
  ModelDescription model;
  for (std::uint32_t b = 0; b < 6; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name, {{.name = name, .shape = {8 * 1024}, .trainable = false}}});
  }
  model.blocks.push_back({.name = "adapters", .parameters = {{.name = "a", .shape = {1024}}}, .held = true});
  model.visits.push_back({6, Pass::kForward});
  for (std::uint32_t b = 0; b < 6; ++b) model.visits.push_back({b, Pass::kForward});
  model.visits.push_back({6, Pass::kBackward});
  for (std::uint32_t b = 6; b-- > 0;) model.visits.push_back({b, Pass::kBackward});
  return model;
}

TEST(PlanFrozen, AHeldBlockHasAPlaceOfItsOwn) {
  const ModelDescription model = model_with_adapters();
  for (const double clipping : {0.0, 1.0}) {
    Config config = config_for(Placement::kNvme, Placement::kNvme);
    config.gradient_clipping = clipping;
    config.hbm_bytes = make_plan(config, model).ledger.total(Placement::kHbm);
    std::vector<std::size_t> fetches;
    for (std::optional<Plan> plan; *config.hbm_bytes > 0; *config.hbm_bytes -= 4 * kKiB) {
      try {
        plan = make_plan(config, model);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kDoesNotFit);
        break;
      }
      const HbmPlan& hbm = plan->hbm;
      const auto own = std::ranges::find(hbm.owners, std::optional(6u));
      ASSERT_NE(own, hbm.owners.end());
      EXPECT_EQ(hbm.places[static_cast<std::size_t>(own - hbm.owners.begin())].bytes, 4 * kKiB) << "no larger than it";
      EXPECT_EQ(std::ranges::count(hbm.owners, std::optional(6u)), 1);
      const std::vector<VisitPlace> visits = planned_visits(*plan, hbm);
      std::size_t fetched = 0;
      for (std::size_t v = 0; v < visits.size(); ++v) {
        const std::uint32_t block = plan->visits[v].block;
        EXPECT_EQ(hbm.owners[visits[v].place] == std::optional(6u), block == 6) << "visit " << v;
        fetched += visits[v].fetch ? 1 : 0;
        if (block == 6) {
          EXPECT_EQ(visits[v].fetch, v == 0);
        }
      }
      fetches.push_back(fetched);
      EXPECT_FALSE(plan->blocks[6].early || plan->blocks[6].speculative);
    }
    ASSERT_FALSE(fetches.empty());
    EXPECT_EQ(fetches.back(), 1 + 6 + 5u) << "with room for one block at a time";
  }
}

TEST(PlanFrozen, BesideAHeldBlockFrozenOnesStay) {
  const ModelDescription model = model_with_adapters();
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.hbm_bytes = kMiB;
  EXPECT_EQ(blocks_that_stay(make_plan(config, model)), (std::vector<std::uint8_t>{1, 1, 1, 1, 1, 1, 0}));
}

}  // namespace
}  // namespace spillway
