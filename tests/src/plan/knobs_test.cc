// What DeepSpeed's knobs change in the plan, and that the plan says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "spillway/units.h"
#include "src/plan/plan.h"
#include "tests/src/named_budget.h"
#include "tests/src/uneven_model.h"

namespace spillway {
namespace {

Config on_nvme() {
  Config config;
  config.weights = DType::kBFloat16;
  config.parameters = config.states = Placement::kNvme;
  config.tile_elements = 4096;
  config.nvme_paths = {"/drive"};
  return config;
}

// A knob that a file sets, alone in otherwise equal configurations.
struct Knobbed {
  Plan plan;
  std::string facts;
};
Knobbed with_knob(const std::function<void(DeepSpeedKnobs&)>& set, Config config = on_nvme(),
                  const ModelDescription& model = testing::uneven_model()) {
  set(config.knobs);
  Plan plan = make_plan(config, model);
  std::string facts;
  for (const std::string& line : plan.facts) facts += line + "\n";
  return {std::move(plan), facts};
}

bool says(const Knobbed& plan, const std::string& words) {
  const bool found = plan.facts.find(words) != std::string::npos;
  if (!found) ADD_FAILURE() << '"' << words << "\" is not in\n" << plan.facts;
  return found;
}

Config roomy() {
  Config config = on_nvme();
  config.hbm_bytes = 8 * kMiB;
  config.host_bytes = 64 * kMiB;
  return config;
}

TEST(PlanKnobs, MaxLiveParametersIsHowMuchThePlacesHoldButTwoStay) {
  const auto live = [](const Plan& plan) {
    std::uint64_t elements = 0;
    for (const Region& place : plan.hbm.places) elements += place.bytes / 2;
    return elements;
  };
  for (std::uint64_t most : {0u, 160u, 300u, 10'000u}) {
    const auto plan = with_knob([&](DeepSpeedKnobs& k) { k.max_live_parameters = most * 1024; }, roomy());
    EXPECT_LE(live(plan.plan), std::max<std::uint64_t>(most, 90 + 70) * 1024);
    EXPECT_GE(plan.plan.hbm.places.size(), 2u);
    EXPECT_EQ(plan.plan.hbm.places.size() < 7, most < 10'000);
  }
  says(with_knob([](DeepSpeedKnobs& k) { k.max_live_parameters = 0; }, roomy()),
       "stage3_max_live_parameters 0: places of weights in HBM 2 instead of 7, visits a step that fetch");
  says(with_knob([](DeepSpeedKnobs& k) { k.max_live_parameters = 1e9; }, roomy()),
       "no limit to this plan: stage3_max_live_parameters 1000000000\n");
}

TEST(PlanKnobs, MaxReuseDistanceLetsBlocksGoThatAreFarFromTheirNextVisit) {
  const auto none = with_knob([](DeepSpeedKnobs&) {}, roomy());
  EXPECT_EQ(testing::fetches(none.plan), 7u);
  const auto some = with_knob([](DeepSpeedKnobs& k) { k.max_reuse_distance = 300 * 1024; }, roomy());
  EXPECT_GT(testing::fetches(some.plan), 7u);
  EXPECT_LT(testing::fetches(some.plan), 15u);
  says(some, "stage3_max_reuse_distance 307200: ");
  says(with_knob([](DeepSpeedKnobs& k) { k.max_reuse_distance = 1e9; }, roomy()), "no limit to this plan");
  EXPECT_EQ(testing::fetches(with_knob([](DeepSpeedKnobs& k) { k.max_reuse_distance = 0; }, roomy()).plan), 15u);
}

TEST(PlanKnobs, PrefetchStopsAtTheBucket) {
  const auto bucket = with_knob([](DeepSpeedKnobs& k) { k.prefetch_bucket_size = 50 * 1024; });
  EXPECT_EQ(bucket.plan.hbm.prefetch_bytes, 50u * 1024 * 2);
  says(bucket, "stage3_prefetch_bucket_size 51200: parameters fetched ahead before the next waits 51200 instead of");
}

TEST(PlanKnobs, BlocksOfSmallParametersHavePlacesOfTheirOwn) {
  const auto plan = with_knob([](DeepSpeedKnobs& k) { k.param_persistence_threshold = 40 * 1024; });
  std::vector<std::uint32_t> owners;
  for (const auto& owner : plan.plan.hbm.owners) {
    if (owner) owners.push_back(*owner);
  }
  EXPECT_EQ(owners, (std::vector<std::uint32_t>{1, 3, 5, 6}));
  says(plan,
       "stage3_param_persistence_threshold 40960: places of weights in HBM 7 instead of 3, blocks with a place "
       "of their own 4 instead of 0");
  const auto capped = with_knob([](DeepSpeedKnobs& k) {
    k.param_persistence_threshold = 40 * 1024;
    k.model_persistence_threshold = 80 * 1024;
  });
  EXPECT_EQ(capped.plan.hbm.places.size(), 5u);
  says(capped, "stage3_model_persistence_threshold 81920: ");
  says(with_knob([](DeepSpeedKnobs& k) { k.param_persistence_threshold = 1000; }), "no limit to this plan");
}

TEST(PlanKnobs, TileBuffersAreAsManyAsTheFileSaysOrThePipelineNeeds) {
  const auto buffers = [](const std::function<void(DeepSpeedKnobs&)>& set) {
    return with_knob(set).plan.host.buffers_count;
  };
  EXPECT_EQ(buffers([](DeepSpeedKnobs&) {}), 4u);
  EXPECT_EQ(buffers([](DeepSpeedKnobs& k) { k.optimizer_buffer_count = 12; }), 12u);
  EXPECT_EQ(buffers([](DeepSpeedKnobs& k) { k.optimizer_buffer_count = 1; }), 1u);
  EXPECT_LT(buffers([](DeepSpeedKnobs& k) { k.optimizer_buffer_count = 1'000'000; }), 200u) << "one a tile is enough";
  const auto serial = [](DeepSpeedKnobs& k) { k.pipeline_read = k.pipeline_write = false; };
  EXPECT_EQ(buffers(serial), 1u);
  const auto no_read = with_knob([](DeepSpeedKnobs& k) { k.pipeline_read = false; });
  EXPECT_FALSE(no_read.plan.host.reads_ahead);
  EXPECT_TRUE(no_read.plan.host.writes_behind);
  says(no_read, "offload_optimizer.pipeline_read false: tile buffers 2 instead of 4, tiles read ahead of the update 0");
  const auto no_write = with_knob([](DeepSpeedKnobs& k) { k.pipeline_write = false; });
  EXPECT_TRUE(no_write.plan.host.reads_ahead);
  EXPECT_FALSE(no_write.plan.host.writes_behind);
  says(no_write, "offload_optimizer.pipeline_write false: ");
}

TEST(PlanKnobs, BuffersOfOffloadParamLimitWhatIsInFlightAndMaxInCpuWhatIsKept) {
  const Config config = on_nvme();
  const std::uint64_t usual = make_plan(config, testing::uneven_model()).host.chunks.bytes;
  const auto small = with_knob([](DeepSpeedKnobs& k) {
    k.param_buffer_count = 5;
    k.param_buffer_size = 1 << 20;  // 5 × 1 Mi × 2 bytes
  });
  EXPECT_EQ(small.plan.host.chunks.bytes, 10 * kMiB);
  EXPECT_LT(small.plan.host.chunks.bytes, usual);
  says(small, "offload_param.buffer_size 1048576: KiB of weights in flight 10240 instead of 32768");
  EXPECT_EQ(with_knob([](DeepSpeedKnobs& k) { k.param_buffer_count = 5; }).plan.host.chunks.bytes, usual);

  const auto kept = [](const Plan& plan) {
    std::uint64_t elements = 0;
    for (const TilePlace& t : plan.tile_places) {
      elements += t.home[index_of(Part::kWeights)] == Placement::kHost ? t.shape.count : 0;
    }
    return elements;
  };
  EXPECT_EQ(kept(with_knob([](DeepSpeedKnobs&) {}, roomy()).plan), 370u * 1024);
  const auto capped = with_knob([](DeepSpeedKnobs& k) { k.max_in_cpu = 100 * 1024; }, roomy());
  EXPECT_EQ(kept(capped.plan), 100u * 1024);
  says(capped, "offload_param.max_in_cpu 102400: tiles whose weights stay in host memory 26 instead of");
}

// With one buffer the store's probe area is small, and so is the store; without the knob it would not fit.
TEST(PlanKnobs, APlanThatFitsIsMadeWhereItWouldNotFitWithoutTheKnob) {
  Config config = on_nvme();
  config.knobs.optimizer_buffer_count = 1;
  config.nvme_bytes = 1;
  config.nvme_bytes = testing::named_bytes(testing::refused_plan(config, testing::uneven_model()));
  says(with_knob([](DeepSpeedKnobs&) {}, config),
       "offload_optimizer.buffer_count 1: without it spillway.nvme_bytes would be too small\n");
}

}  // namespace
}  // namespace spillway
