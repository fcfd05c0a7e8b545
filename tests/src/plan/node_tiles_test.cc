#include "src/plan/node_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "spillway/units.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPage = 4 * kKiB, kHugePage = 2 * kMiB;

ModelDescription model_of(std::vector<std::uint64_t> counts) {
  ModelDescription model;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name,
                            {{.name = name + ".weight", .shape = {counts[b]}},
                             {.name = name + ".frozen", .shape = {2000}, .trainable = false}}});
  }
  return model;
}

Config config_of(Placement parameters, Placement states, std::uint64_t tile_elements = 8192) {
  Config config;
  config.weights = DType::kBFloat16;
  config.parameters = parameters;
  config.states = states;
  config.tile_elements = tile_elements;
  if (parameters == Placement::kNvme || states == Placement::kNvme) config.nvme_paths = {"/drive"};
  return config;
}

std::uint32_t trainable_tiles(const Plan& plan) {
  return static_cast<std::uint32_t>(
      std::ranges::count_if(plan.tiles, [](const TilePlan& tile) { return tile.range.trainable; }));
}

TEST(UpdateOrder, IsThatOfThePlanWithOneNodeAndWithFewTiles) {
  const Plan plan = make_plan(config_of(Placement::kHost, Placement::kHost), model_of({100'000, 5, 40'000}));
  std::vector<std::uint32_t> trainable;
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
    if (plan.tiles[t].range.trainable) trainable.push_back(t);
  }
  EXPECT_EQ(update_order(plan, 1), trainable);
  EXPECT_EQ(update_order(plan, 2), trainable) << "runs of one";
}

// A plan of so many trainable tiles and nothing else that the order looks at.
Plan plan_of(std::size_t tiles) {
  Plan plan;
  plan.tiles.assign(tiles, {.block = 0, .range = {.first = 0, .count = 1024, .trainable = true}, .groups = {}});
  return plan;
}

TEST(UpdateOrder, OfALargeModelGivesEachNodeRunsOfNeighbours) {
  auto random = seeded_generator();
  for (int round = 0; round < 50; ++round) {
    const std::size_t tiles = random() % 20'000;
    const auto nodes = static_cast<unsigned>(1 + random() % 8);
    const std::vector<std::uint32_t> order = update_order(plan_of(tiles), nodes);
    std::vector<unsigned> node_of(tiles, nodes);
    for (std::size_t i = 0; i < order.size(); ++i) node_of.at(order[i]) = static_cast<unsigned>(i % nodes);
    ASSERT_EQ(order.size(), tiles);
    ASSERT_EQ(std::ranges::count(node_of, nodes), 0) << "every tile once";
    std::size_t runs = tiles > 0;
    for (std::size_t t = 1; t < tiles; ++t) runs += node_of[t] != node_of[t - 1];
    ASSERT_LE(runs, nodes * (1'024 + 1)) << tiles << " tiles on " << nodes << " nodes";
  }
}

TEST(UpdatingNodes, AreOneWithoutBuffersForEachOrWithStatesOnTheDevice) {
  Plan plan;
  plan.host.buffers_count = 6;
  EXPECT_EQ(updating_nodes(plan, 1), 1u);
  EXPECT_EQ(updating_nodes(plan, 2), 2u);
  EXPECT_EQ(updating_nodes(plan, 3), 3u);
  EXPECT_EQ(updating_nodes(plan, 4), 1u);
  EXPECT_EQ(updating_nodes(plan, 8), 1u);
  plan.gradients_in_hbm = true;
  EXPECT_EQ(updating_nodes(plan, 2), 1u);
}

TEST(PlanForNodes, HasBuffersInMultiplesOfThemWhereTheBudgetHasRoom) {
  const ModelDescription model = model_of({1'000'000, 500'000});
  for (Placement placement : {Placement::kHost, Placement::kNvme}) {
    for (unsigned nodes = 1; nodes <= 9; ++nodes) {
      Config config = config_of(placement, placement);
      Plan plan = make_plan(config, model, nodes);
      EXPECT_EQ(plan.host.buffers_count % nodes, 0u);
      EXPECT_EQ(updating_nodes(plan, nodes), nodes);
      EXPECT_LE(plan.host.buffers_count, nodes + 3 + nodes - 1);
      for (const std::uint64_t total = plan.ledger.total(Placement::kHost); config.host_bytes.value_or(total) > 0;) {
        config.host_bytes = config.host_bytes.value_or(total) - plan.host.buffer_bytes;
        try {
          plan = make_plan(config, model, nodes);
        } catch (const Error&) {
          break;  // too small for any number of nodes
        }
        const std::uint32_t buffers = plan.host.buffers_count;
        EXPECT_TRUE(buffers % nodes == 0 || buffers < nodes) << buffers << " buffers, " << nodes << " nodes";
      }
    }
  }
}

TEST(PlanForOneNode, IsThePlan) {
  const Config config = config_of(Placement::kNvme, Placement::kNvme);
  const Plan plan = make_plan(config, model_of({100'000}));
  EXPECT_EQ(plan.host.buffers_count, 4u);
  EXPECT_EQ(make_plan(config_of(Placement::kHost, Placement::kHost), model_of({100'000})).host.buffers_count, 1u);
}

// Whose is the byte of the arena? By the regions, or by the definition: of the tile's buffer, parts and gradient.
unsigned node_by_regions(const std::vector<NodeRegion>& regions, std::uint64_t byte, unsigned none) {
  for (const NodeRegion& placed : regions) {
    if (byte >= placed.region.offset && byte - placed.region.offset < placed.region.bytes) return placed.node;
  }
  return none;
}

struct Owned {
  std::uint64_t offset, bytes;
  unsigned node;
};
std::vector<Owned> owned_bytes(const Plan& plan, unsigned nodes) {
  std::vector<Owned> all;
  const auto order = update_order(plan, nodes);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto node = static_cast<unsigned>(i % nodes);
    const TilePlan& tile = plan.tiles[order[i]];
    const TilePlace& place = plan.tile_places[order[i]];
    const std::uint64_t buffer = i % plan.host.buffers_count;  // as the updater takes them
    all.push_back({plan.host.buffers.offset + buffer * plan.host.buffer_bytes, plan.host.buffer_bytes, node});
    if (plan.blocks[tile.block].gradient_home == Placement::kHost) {
      all.push_back({plan.blocks[tile.block].gradient.offset + 2 * tile.range.first, 2 * tile.range.count, node});
    }
    for (Part part : {Part::kWeights, Part::kStates}) {
      if (place.home[index_of(part)] != Placement::kHost) continue;
      all.push_back({place.offset[index_of(part)], extent_bytes(place.shape, part), node});
    }
  }
  return all;
}

TEST(NodeRegions, AreWholePagesInsideTheArenaThatDoNotOverlapAndFollowTheTiles) {
  auto random = seeded_generator();
  constexpr Placement kPlacements[] = {Placement::kHost, Placement::kNvme};
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint64_t> counts(1 + random() % 4);
    for (std::uint64_t& count : counts) count = 1 + random() % 300'000;
    const auto nodes = static_cast<unsigned>(2 + random() % 4);
    Config config = config_of(kPlacements[random() % 2], kPlacements[random() % 2], 1024 * (1 + random() % 64));
    if (random() % 2 == 0) config.host_bytes = (4 + random() % 8) * kMiB;
    Plan plan;
    try {
      plan = make_plan(config, model_of(counts), nodes);
    } catch (const Error&) {
      continue;  // the budget is too small
    }
    if (updating_nodes(plan, nodes) == 1) continue;
    const std::uint64_t arena = plan.ledger.total(Placement::kHost);
    for (std::uint64_t page : {kPage, 16 * kPage, kHugePage}) {
      const std::vector<NodeRegion> regions = node_regions(plan, nodes, page);
      std::uint64_t end = 0;
      for (const NodeRegion& placed : regions) {
        ASSERT_EQ(placed.region.offset % page, 0u);
        ASSERT_GT(placed.region.bytes, 0u);
        ASSERT_GE(placed.region.offset, end);
        end = placed.region.offset + placed.region.bytes;
        ASSERT_TRUE(end % page == 0 || end == arena);
        ASSERT_LE(end, arena);
        ASSERT_LT(placed.node, nodes);
      }
      for (const Owned& owned : owned_bytes(plan, nodes)) {
        const std::uint64_t last = owned.offset + owned.bytes - 1;
        for (std::uint64_t first = align_up(owned.offset, page); first <= last; first += page) {
          ASSERT_EQ(node_by_regions(regions, first, nodes), owned.node);
          ASSERT_EQ(node_by_regions(regions, std::min(first + page, arena) - 1, nodes), owned.node);
        }
      }
    }
  }
}

TEST(NodeRegions, OfNeighboursOnOneNodeAreOne) {
  const Plan plan = make_plan(config_of(Placement::kHost, Placement::kHost), model_of({8192 * 4}), 2);
  std::size_t changes = 0;
  const auto regions = node_regions(plan, 2, kPage);
  for (std::size_t i = 1; i < regions.size(); ++i) {
    const NodeRegion &a = regions[i - 1], &b = regions[i];
    if (a.region.offset + a.region.bytes != b.region.offset) continue;
    ++changes;
    EXPECT_NE(a.node, b.node);
  }
  EXPECT_GT(changes, 0u);
  EXPECT_EQ(trainable_tiles(plan), 4u);
}

}  // namespace
}  // namespace spillway
