#include "src/plan/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "kernels/tile_update.h"
#include "spillway/error.h"
#include "src/plan/plan.h"
#include "tests/seed.h"

namespace spillway {
namespace {

using testing::HasSubstr;

std::string refusal(const Block& block) {
  try {
    partition_block(block);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

Block random_block(std::mt19937_64& random) {
  Block block{.name = "block", .parameters = {}};
  const int count = 1 + static_cast<int>(random() % 7);
  for (int i = 0; i < count; ++i) {
    block.parameters.push_back({.name = std::string(1, 'p').append(std::to_string(i)),
                                .shape = {1 + random() % 300, 1 + random() % 300},
                                .trainable = random() % 3 != 0});
  }
  return block;
}

TEST(PartitionBlock, ReducedStatesLieFirstAndAreCutWhereTheirBytesFillGranules) {
  constexpr StateArray kBytes[] = {{.name = kExpAvg, .type = "int8", .bytes = 1, .group = 32, .scale = "bf16"}};
  const Block block{.name = "b",
                    .parameters = {{.name = "base", .shape = {2000}, .trainable = false},
                                   {.name = "norm", .shape = {1000}},
                                   {.name = "matrix", .shape = {700, 1024}},
                                   {.name = "bias", .shape = {1024}}}};
  const BlockPartition partition = partition_block(
      block, [&](const Parameter& parameter) { return parameter.shape.size() > 1 ? StateList(kBytes) : StateList(); });
  ASSERT_EQ(partition.sections.size(), 3u);
  EXPECT_EQ(partition.parameters[2].first, 0u);
  EXPECT_EQ(partition.parameters[1].first, 700u * 1024);
  EXPECT_EQ(partition.parameters[3].first, 701u * 1024);
  EXPECT_EQ(partition.parameters[0].first, 702u * 1024);
  EXPECT_EQ(partition.trainable_elements, 702u * 1024);
  std::vector<std::uint64_t> counts;
  for (const TileRange& tile : cut_tiles(partition, 4 << 20, Rank{})) counts.push_back(tile.count);
  EXPECT_EQ(counts, (std::vector<std::uint64_t>{2 * kHashedByteUnit, 188 * 1024, 2048, 2048}));
}

TEST(PartitionBlock, TrainableParametersComeFirstAndEachStartsAtAMultipleOf1024) {
  const Block block{.name = "b",
                    .parameters = {{.name = "frozen", .shape = {1025}, .trainable = false},
                                   {.name = "w", .shape = {30, 100}},
                                   {.name = "scalar", .shape = {}},
                                   {.name = "exact", .shape = {2, 512}}}};
  const BlockPartition partition = partition_block(block);
  ASSERT_EQ(partition.parameters.size(), 4u);
  EXPECT_EQ(partition.parameters[1].first, 0u);
  EXPECT_EQ(partition.parameters[1].count, 3000u);
  EXPECT_EQ(partition.parameters[2].first, 3072u);
  EXPECT_EQ(partition.parameters[2].count, 1u);  // rank 0 is one element
  EXPECT_EQ(partition.parameters[3].first, 4096u);
  EXPECT_EQ(partition.parameters[3].count, 1024u);  // no padding
  EXPECT_EQ(partition.trainable_elements, 5120u);
  EXPECT_EQ(partition.parameters[0].first, 5120u);
  EXPECT_EQ(partition.elements, 5120u + 2048u);
}

TEST(PartitionBlock, HostileDescriptionsAreRefusedByName) {
  const std::uint64_t big = std::uint64_t{1} << 32;
  EXPECT_THAT(refusal({.name = "b", .parameters = {}}), HasSubstr("block b: it has no parameters"));
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "", .shape = {1}}}}), HasSubstr("no name"));
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "w", .shape = {1}}, {.name = "w", .shape = {2}}}}),
              HasSubstr("w: the name occurs twice"));
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "w", .shape = {3, 0}}}}), HasSubstr("w: a dimension"));
  // 2^32 × 2^32 is 0 in 64 bits, and 2^32 × 2^31 × 2 is, too.
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "w", .shape = {big, big}}}}), HasSubstr("w: its shape"));
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "w", .shape = {big, big / 2, 2}}}}),
              HasSubstr("w: its shape"));
  const std::uint64_t most = std::uint64_t{1} << 55;
  EXPECT_THAT(refusal({.name = "b", .parameters = {{.name = "v", .shape = {most}}, {.name = "w", .shape = {most}}}}),
              HasSubstr("block b: it has more"));
  EXPECT_EQ(refusal({.name = "b", .parameters = {{.name = "w", .shape = {most}}}}), "accepted");
}

// What must hold for any block, tile size and number of ranks.
void expect_partition_rules(const BlockPartition& partition, std::uint64_t tile_elements, std::uint32_t ranks) {
  std::uint64_t next_trainable = 0, next_frozen = partition.trainable_elements;
  std::vector<std::uint64_t> share(ranks), frozen_share(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    bool frozen_seen = false;
    std::uint64_t last_count = tile_elements;
    for (const TileRange& tile : cut_tiles(partition, tile_elements, {rank, ranks})) {
      if (!tile.trainable && !frozen_seen) last_count = tile_elements;
      frozen_seen |= !tile.trainable;
      EXPECT_TRUE(!tile.trainable || !frozen_seen) << "a trainable tile after a frozen one";
      ASSERT_EQ(tile.first % 1024, 0u);
      ASSERT_EQ(tile.count % 1024, 0u);
      ASSERT_TRUE(tile.count > 0 && tile.count <= tile_elements);
      // Only a shard's last tile may be short, or the last two: whole units, and what is left of one.
      const bool cut_again = last_count % kHashedTileUnit == 0 && tile.count < kHashedTileUnit;
      ASSERT_TRUE(last_count == tile_elements || cut_again) << last_count << ", then " << tile.count;
      last_count = tile.count;
      // Ranks in order leave no gap and overlap nowhere.
      std::uint64_t& next = tile.trainable ? next_trainable : next_frozen;
      ASSERT_EQ(tile.first, next);
      next += tile.count;
      (tile.trainable ? share : frozen_share)[rank] += tile.count;
    }
  }
  EXPECT_EQ(next_trainable, partition.trainable_elements);
  EXPECT_EQ(next_frozen, partition.elements);
  for (const auto& shares : {share, frozen_share}) {
    const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
    EXPECT_LE(*most - *least, 1024u);
  }
}

TEST(PartitionBlock, ParametersWithStatesOfOneDescriptionLieTogether) {
  static constexpr StateArray kOther[] = {{.name = kExpAvg, .type = "bf16", .bytes = 2}};
  static constexpr StateArray kAlike[] = {{.name = kExpAvg, .type = "bf16", .bytes = 2}};
  const Block block{.name = "b",
                    .parameters = {{.name = "w0", .shape = {3000}},
                                   {.name = "frozen", .shape = {10}, .trainable = false},
                                   {.name = "e0", .shape = {1}},
                                   {.name = "w1", .shape = {1024}},
                                   {.name = "e1", .shape = {2048}}}};
  const BlockPartition partition = partition_block(block, [](const Parameter& parameter) -> StateList {
    EXPECT_TRUE(parameter.trainable);
    if (parameter.name[0] == 'e') return {};
    return parameter.name == "w0" ? StateList(kOther) : StateList(kAlike);
  });
  std::vector<std::uint64_t> first;
  for (const ParameterPlace& place : partition.parameters) first.push_back(place.first);
  EXPECT_EQ(first, (std::vector<std::uint64_t>{0, 7168, 4096, 3072, 5120}));
  EXPECT_EQ(partition.trainable_elements, 7168u);
  ASSERT_EQ(partition.sections.size(), 3u);
  EXPECT_TRUE(std::ranges::equal(partition.sections[0].states, kOther));
  EXPECT_TRUE(partition.sections[1].states.empty() && partition.sections[1].trainable);
  EXPECT_FALSE(partition.sections[2].trainable);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> tiles;
  for (const TileRange& tile : cut_tiles(partition, 2048, Rank{})) {
    tiles.emplace_back(tile.first, tile.count);
    EXPECT_EQ(tile.states.size(), tile.first < 4096 ? 1u : 0u);
  }
  EXPECT_EQ(tiles, (std::vector<std::pair<std::uint64_t, std::uint64_t>>{
                       {0, 2048}, {2048, 2048}, {4096, 2048}, {6144, 1024}, {7168, 1024}}));
}

TEST(CutTiles, TilesAreDisjointCoverTheBlockAndAreBalancedForOneTo64Ranks) {
  std::mt19937_64 random(test_seed());
  for (std::uint32_t ranks = 1; ranks <= 64; ++ranks) {
    for (int round = 0; round < 4; ++round) {
      const BlockPartition partition = partition_block(random_block(random));
      expect_partition_rules(partition, 1024 * (1 + random() % 40), ranks);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(CutTiles, MoreRanksThanUnitsLeavesSomeWithNothing) {
  const BlockPartition partition = partition_block({.name = "b", .parameters = {{.name = "w", .shape = {1500}}}});
  expect_partition_rules(partition, 4096, 64);
  EXPECT_EQ(cut_tiles(partition, 4096, {0, 64}).size(), 1u);
  EXPECT_EQ(cut_tiles(partition, 4096, {1, 64}).size(), 1u);
  EXPECT_TRUE(cut_tiles(partition, 4096, {2, 64}).empty());
}

TEST(ShardOf, TheLargestBlockAndManyRanksDoNotOverflow) {
  const std::uint64_t most = std::uint64_t{1} << 55;
  std::uint64_t next = 0;
  for (std::uint32_t rank = 0; rank < 4093; ++rank) {
    const Shard shard = shard_of(0, most, {rank, 4093});
    ASSERT_EQ(shard.first, next);
    next += shard.count;
  }
  EXPECT_EQ(next, most);
}

// A GPT-2 layer of 1,280 columns, in tiles of the default size: all but a sliver is hashed while it is updated.
TEST(CutTiles, WhatIsLeftOfAShardIsCutIntoWholeUnitsAndTheRest) {
  const Block layer{.name = "h", .parameters = {{.name = "all", .shape = {12 * 1280 * 1280 + 13 * 1280}}}};
  std::vector<std::uint64_t> counts;
  for (const TileRange& tile : cut_tiles(partition_block(layer), 4 << 20, Rank{})) counts.push_back(tile.count);
  EXPECT_EQ(counts, (std::vector<std::uint64_t>{4 << 20, 4 << 20, 4 << 20, 4 << 20, 22 * kHashedTileUnit, 17'408}));
}

// Each rank plans its own part, of all blocks, and its store is of that rank.
TEST(Partition, PlansOfRanksShareTheTiles) {
  ModelDescription model;
  for (const char* name : {"a", "b", "c"}) model.blocks.push_back({name, {{.name = name, .shape = {100, 100}}}});
  Config config;
  config.states = config.parameters = Placement::kNvme;
  config.nvme_paths = {"nowhere"};
  std::uint64_t elements = 0, whole = 0;
  for (const TilePlan& tile : make_plan(config, model).tiles) whole += tile.range.count;
  for (std::uint32_t index = 0; index < 2; ++index) {
    const Plan plan = make_plan(config, model, 1, {.index = index, .count = 2});
    EXPECT_EQ(plan.identity.rank, (Rank{index, 2}));
    EXPECT_EQ(plan.blocks.size(), model.blocks.size());
    for (const TilePlan& tile : plan.tiles) elements += tile.range.count;
  }
  EXPECT_EQ(elements, whole);
}

}  // namespace
}  // namespace spillway
