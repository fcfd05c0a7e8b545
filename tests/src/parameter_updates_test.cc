#include "src/engine/parameter_updates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "spillway/error.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct SweepSetup {
  SweepSetup() {
    model.blocks = {{"a",
                     {{.name = "a.0", .shape = {3000}},
                      {.name = "a.1", .shape = {1024}},
                      {.name = "a.2", .shape = {10}, .trainable = false},
                      {.name = "a.3", .shape = {5000}},
                      {.name = "a.4", .shape = {1}}}},
                    {"b", {{.name = "b.0", .shape = {2048}}, {.name = "b.1", .shape = {2048}}}}};
    config.tile_elements = 4096;
    config.optimizer.weight_decay = 0.1;
    config.parameter_groups = {{.parameters = {"a.3"}, .learning_rate = {}, .weight_decay = 0.5}};
    config.schedule = {.kind = ScheduleKind::kWarmup, .warmup_max_lr = 1e-2, .warmup_steps = 50};
    plan = make_plan(config, model);
    updates.emplace(config, plan, model);
  }
  // An update without those that are named.
  void update(std::uint64_t step, const std::vector<std::string>& without) {
    updates->begin_update(step, 0.5);
    for (std::uint32_t b = 0; b < model.blocks.size(); ++b) {
      std::vector<std::uint8_t> brought;
      for (const Parameter& parameter : model.blocks[b].parameters) {
        brought.push_back(parameter.trainable && std::ranges::find(without, parameter.name) == without.end());
      }
      updates->take(b, brought);
    }
  }
  // The scalars of an element of a block; null: it is not updated.
  const OptimizerScalars* scalars_at(std::uint32_t block, std::uint64_t element) {
    for (std::uint32_t t = plan.blocks[block].first_tile;; ++t) {
      const TileRange& tile = plan.tiles[t].range;
      if (element >= tile.first + tile.count) continue;
      const auto ranges = updates->ranges(t, room);
      EXPECT_EQ(ranges.back().end, tile.count);
      const auto found = std::ranges::upper_bound(ranges, element - tile.first, {}, &GroupRange::end);
      return found->group == kNotUpdated ? nullptr : &updates->scalars()[found->group];
    }
  }

  ModelDescription model;
  Config config;
  Plan plan;
  std::optional<ParameterUpdates> updates;
  std::vector<GroupRange> room;
};

void expect_equal(const OptimizerScalars& got, const OptimizerScalars& wanted) {
  EXPECT_EQ(got.step_size, wanted.step_size);
  EXPECT_EQ(got.inv_sqrt_bias2, wanted.inv_sqrt_bias2);
  EXPECT_EQ(got.negative_lr_decay, wanted.negative_lr_decay);
  EXPECT_EQ(got.gradient_scale, wanted.gradient_scale);
}

// The reference: by name, the learning rate of the step and the bias correction of the parameter's own count.
TEST(ParameterUpdates, EachParameterTakesTheRateOfTheStepAndTheBiasCorrectionOfItsOwnCount) {
  SweepSetup setup;
  auto random = seeded_generator();
  std::map<std::string, std::uint64_t> had;
  for (std::uint64_t step = 1; step <= 40; ++step) {
    std::vector<std::string> without;
    for (const Block& block : setup.model.blocks) {
      for (const Parameter& parameter : block.parameters) {
        if (step > 3 && random() % 3 == 0) without.push_back(parameter.name);
      }
    }
    setup.update(step, without);
    for (std::uint32_t b = 0; b < setup.model.blocks.size(); ++b) {
      for (std::size_t p = 0; p < setup.model.blocks[b].parameters.size(); ++p) {
        const Parameter& parameter = setup.model.blocks[b].parameters[p];
        if (!parameter.trainable) continue;
        SCOPED_TRACE(parameter.name + " in step " + std::to_string(step));
        const ParameterPlace& place = setup.plan.blocks[b].partition.parameters[p];
        const OptimizerScalars *first = setup.scalars_at(b, place.first),
                               *last = setup.scalars_at(b, place.first + place.count - 1);
        const bool out = std::ranges::find(without, parameter.name) != without.end();
        ASSERT_EQ(first == nullptr, out);
        ASSERT_EQ(last == nullptr, out);
        if (out) continue;
        OptimizerConfig optimizer = setup.config.optimizer;
        optimizer.learning_rate = learning_rate(setup.config, step);
        if (parameter.name == "a.3") optimizer.weight_decay = 0.5;
        const OptimizerScalars wanted = optimizer_scalars(optimizer, ++had[parameter.name], 0.5);
        expect_equal(*first, wanted);
        expect_equal(*last, wanted);
      }
    }
    setup.updates->advance();
  }
  const auto counts = setup.updates->counts(40);
  ASSERT_EQ(counts.size(), 7u);
  EXPECT_EQ(counts[2], 0u) << "frozen";
  EXPECT_EQ(counts[5], had["b.0"]);
}

TEST(ParameterUpdates, WhileAllHaveHadAllUpdatesRangesAreThePlans) {
  SweepSetup setup;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    setup.update(step, {});
    for (std::uint32_t t = 0; t < setup.plan.tiles.size(); ++t) {
      if (!setup.plan.tiles[t].range.trainable) continue;
      EXPECT_EQ(setup.updates->ranges(t, setup.room).data(), setup.plan.tiles[t].groups.data());
    }
    setup.updates->advance();
    EXPECT_THAT(setup.updates->counts(step), IsEmpty());
  }
}

TEST(ParameterUpdates, NeighboursThatAreLeftOutTogetherAreOneRange) {
  SweepSetup setup;
  setup.update(1, {"a.0", "a.1", "b.0", "b.1"});
  EXPECT_EQ(setup.scalars_at(1, 0), nullptr);
  setup.updates->advance();
  setup.update(2, {});
  const auto ranges = setup.updates->ranges(setup.plan.blocks[1].first_tile, setup.room);
  EXPECT_EQ(ranges.size(), 1u);
  EXPECT_NE(ranges.data(), setup.plan.tiles[setup.plan.blocks[1].first_tile].groups.data());
  EXPECT_EQ(setup.scalars_at(0, 0), setup.scalars_at(0, 3072));
  EXPECT_NE(setup.scalars_at(0, 0), setup.scalars_at(0, 4096));
}

TEST(ParameterUpdates, WhatIsNotMadeDoesNotCount) {
  SweepSetup setup;
  setup.update(1, {"a.0"});
  setup.update(1, {});
  setup.updates->advance();
  EXPECT_THAT(setup.updates->counts(1), IsEmpty());
}

TEST(ParameterUpdates, GoOnFromWhatWasKept) {
  SweepSetup setup, again;
  setup.update(1, {"a.1"});
  setup.updates->advance();
  EXPECT_THAT(setup.updates->counts(1), ElementsAre(1, 0, 0, 1, 1, 1, 1));
  again.updates->resume(1, setup.updates->counts(1), "the store");
  EXPECT_THAT(again.updates->counts(1), ElementsAre(1, 0, 0, 1, 1, 1, 1));
  again.updates->resume(7, {}, "the store");
  EXPECT_THAT(again.updates->counts(7), IsEmpty());
  for (const std::vector<std::uint64_t>& wrong : {std::vector<std::uint64_t>{1, 1}, {1, 1, 1, 1, 1, 1, 9}}) {
    try {
      again.updates->resume(7, wrong, "the store");
      ADD_FAILURE() << "was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt);
    }
  }
}

}  // namespace
}  // namespace spillway
