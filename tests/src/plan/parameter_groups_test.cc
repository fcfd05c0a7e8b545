#include "src/plan/parameter_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "spillway/error.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

using testing::HasSubstr;

ModelDescription model() {
  ModelDescription model;
  model.blocks = {{"e", {{.name = "wte.weight", .shape = {50, 8}}, {.name = "ln_f.bias", .shape = {8}}}},
                  {"h",
                   {{.name = "h.0.attn.weight", .shape = {8, 24}},
                    {.name = "h.0.attn.bias", .shape = {24}},
                    {.name = "h.0.frozen", .shape = {8, 8}, .trainable = false}}}};
  return model;
}

Config base() {
  Config config;
  config.optimizer.learning_rate = 1e-3;
  config.optimizer.weight_decay = 0.1;
  return config;
}

GroupValues values(const ParameterGroups& groups, std::size_t block, std::size_t parameter) {
  return groups.values[groups.parameter[block][parameter]];
}

std::string refusal(const Config& config) {
  try {
    group_parameters(config, model());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

TEST(ParameterGroups, WithoutGroupsAllShareTheOptimizersValues) {
  const ParameterGroups groups = group_parameters(base(), model());
  ASSERT_EQ(groups.values.size(), 1u);
  EXPECT_EQ(groups.values[0], (GroupValues{1e-3, 0.1}));
  EXPECT_TRUE(describe_groups(groups, model()).empty());
}

TEST(ParameterGroups, NoDecayExceptsWhatHasFewerThanTwoDimensions) {
  Config config = base();
  config.no_decay = true;
  const ParameterGroups groups = group_parameters(config, model());
  EXPECT_EQ(values(groups, 0, 0), (GroupValues{1e-3, 0.1}));
  EXPECT_EQ(values(groups, 0, 1), (GroupValues{1e-3, 0}));
  EXPECT_EQ(values(groups, 1, 1), (GroupValues{1e-3, 0}));
  const auto lines = describe_groups(groups, model());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "parameter group: lr 0.001, weight decay 0.1: 2 tensors, 592 parameters");
  EXPECT_EQ(lines[1], "parameter group: lr 0.001, weight decay 0: 2 tensors, 32 parameters");
}

TEST(ParameterGroups, TheFirstThatMatchesDecidesAndKeepsWhatItDoesNotSay) {
  Config config = base();
  config.no_decay = true;
  config.parameter_groups = {{.parameters = {"*.attn.*"}, .learning_rate = 5e-4, .weight_decay = {}},
                             {.parameters = {"h.*.bias", "wte.*"}, .learning_rate = {}, .weight_decay = 0.3}};
  const ParameterGroups groups = group_parameters(config, model());
  EXPECT_EQ(values(groups, 1, 0), (GroupValues{5e-4, 0.1}));
  EXPECT_EQ(values(groups, 1, 1), (GroupValues{5e-4, 0})) << "no_decay holds, the second group does not";
  EXPECT_EQ(values(groups, 0, 0), (GroupValues{1e-3, 0.3}));
  EXPECT_EQ(values(groups, 0, 1), (GroupValues{1e-3, 0}));
}

TEST(ParameterGroups, APatternWithoutATrainableParameterIsRefused) {
  Config config = base();
  config.parameter_groups = {{.parameters = {"wte.*", "h.0.atn.*"}, .learning_rate = 1, .weight_decay = {}}};
  EXPECT_THAT(refusal(config), HasSubstr("spillway.parameter_groups[0]: \"h.0.atn.*\" matches no trainable parameter"));
  config.parameter_groups[0].parameters = {"h.0.frozen"};
  EXPECT_THAT(refusal(config), HasSubstr("matches no trainable parameter"));
}

TEST(ParameterGroups, ARateOfItsOwnNeedsAnOptimizersRateToBeScaledWith) {
  Config config = base();
  config.optimizer.learning_rate = 0;
  config.parameter_groups = {{.parameters = {"*"}, .learning_rate = 1, .weight_decay = {}}};
  EXPECT_EQ(refusal(config), "accepted");
  config.schedule.kind = ScheduleKind::kWarmup;
  EXPECT_THAT(refusal(config), HasSubstr("a schedule cannot scale"));
}

TEST(ParameterGroups, AScheduleScalesAGroupsRateAsTheOptimizers) {
  Config config = base();
  config.parameter_groups = {{.parameters = {"wte.*"}, .learning_rate = 2e-4, .weight_decay = {}}};
  const ParameterGroups groups = group_parameters(config, model());
  const auto scalars = [&](std::size_t parameter, std::uint64_t step) {
    return scalars_of(config, values(groups, 0, parameter), {.step = step, .update = step}, 0.5);
  };
  EXPECT_EQ(scalars(0, 1'000'000).step_size, 2e-4f) << "exactly, while the rate is constant";
  EXPECT_EQ(scalars(1, 1'000'000).step_size, 1e-3f);
  EXPECT_EQ(scalars(0, 1'000'000).gradient_scale, 0.5f);
  config.schedule = {
      .kind = ScheduleKind::kWarmup, .warmup_max_lr = 1e-3, .warmup_steps = 100, .logarithmic_warmup = false};
  EXPECT_NEAR(scalars(0, 52).negative_lr_decay, -1e-4 * 0.1, 1e-10) << "half of the way";
  EXPECT_NEAR(scalars(1, 52).negative_lr_decay, -5e-4 * 0.1, 1e-10);
  config.schedule = {};
  config.schedule.given_lr = 1e-2;
  EXPECT_NEAR(scalars(0, 52).negative_lr_decay, -2e-3 * 0.1, 1e-9);
  EXPECT_NEAR(scalars(1, 52).negative_lr_decay, -1e-2 * 0.1, 1e-9);
  config.optimizer.learning_rate = 0;  // of which no rate is a share
  EXPECT_NEAR(scalars(0, 52).negative_lr_decay, -2e-4 * 0.1, 1e-10);
}

// Each element of each tile is in the group of its parameter; neighbours of one group share a range.
TEST(ParameterGroups, RangesOfTilesCoverEveryElementOnce) {
  auto random = seeded_generator();
  for (int round = 0; round < 200; ++round) {
    Block block{.name = "b", .parameters = {}};
    std::vector<std::uint32_t> group;
    for (std::uint64_t p = 0; p < 1 + random() % 9; ++p) {
      block.parameters.push_back(
          {.name = std::to_string(p), .shape = {1 + random() % 9000}, .trainable = p == 0 || random() % 4 != 0});
      group.push_back(static_cast<std::uint32_t>(random() % 3));
    }
    const BlockPartition partition = partition_block(block);
    for (const TileRange& tile : cut_tiles(partition, 1024 * (1 + random() % 6), Rank{})) {
      if (!tile.trainable) continue;
      std::vector<GroupRange> ranges{{1, 7}};
      ranges_of(partition, group, tile, ranges);
      ASSERT_FALSE(ranges.empty());
      EXPECT_EQ(ranges.back().end, tile.count);
      for (std::size_t r = 1; r < ranges.size(); ++r) {
        EXPECT_LT(ranges[r - 1].end, ranges[r].end);
        EXPECT_NE(ranges[r - 1].group, ranges[r].group);
      }
      for (std::size_t p = 0; p < block.parameters.size(); ++p) {
        const ParameterPlace& place = partition.parameters[p];
        for (std::uint64_t i : {place.first, place.first + place.count - 1}) {
          if (!block.parameters[p].trainable || i < tile.first || i >= tile.first + tile.count) continue;
          const auto found = std::ranges::upper_bound(ranges, i - tile.first, {}, &GroupRange::end);
          EXPECT_EQ(found->group, group[p]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace spillway
