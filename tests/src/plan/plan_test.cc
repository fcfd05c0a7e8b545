#include "src/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/norm.h"
#include "spillway/units.h"
#include "swap/tile_mover.h"
#include "tests/error_of.h"
#include "tests/src/named_budget.h"
#include "tests/src/plan/planned_activations.h"
#include "tests/src/random_model.h"
#include "tests/src/uneven_model.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPage = 4096;

using testing::config_for;
using testing::kPlacements;

ModelDescription model_of(std::uint32_t blocks) {
  ModelDescription model;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back(
        {name, {{.name = name + ".weight", .shape = {100, 100}}, {.name = name + ".bias", .shape = {100}}}});
  }
  model.workspace_bytes = 5000;
  return model;
}

Error refusal(const Config& config, const ModelDescription& model) {
  return testing::error_of([&] { make_plan(config, model); });
}

struct Random : testing::Random {
  ModelDescription model() {
    ModelDescription model = testing::Random::model();
    testing::add_activations(model, generator());
    return model;
  }
};

// Every region of an arena, with what it is for.
struct Named {
  std::string purpose;
  Region region;
};

std::vector<Named> hbm_regions(const Plan& plan) {
  std::vector<Named> all = {{"workspace", plan.hbm.workspace},
                            {"leaves", plan.hbm.leaves},
                            {"norms", plan.hbm.norms},
                            {"finite", plan.hbm.finite}};
  for (const Region& place : plan.hbm.places) all.push_back({"place", place});
  for (const Region& staging : plan.hbm.staging) all.push_back({"staging", staging});
  for (const Region& place : plan.hbm.accumulators) all.push_back({"accumulator place", place});
  for (const Region& place : plan.activations.places) all.push_back({"activation", place});
  for (const BlockPlan& block : plan.blocks) {
    if (block.insides_kept) {
      all.push_back({"insides", block.insides});
    } else if (block.insides.bytes > 0) {
      EXPECT_EQ(block.insides.offset, plan.hbm.insides.offset);
      EXPECT_LE(block.insides.bytes, plan.hbm.insides.bytes);
    }
  }
  all.push_back({"insides in turn", plan.hbm.insides});
  Region shared;
  for (const BlockPlan& block : plan.blocks) {
    all.push_back({"weights", block.weights});
    if (plan.gradients_in_hbm) all.push_back({"gradient", block.gradient});
    if (!block.accumulator) continue;
    EXPECT_EQ(block.accumulator->bytes, block.partition.trainable_elements * 4);
    if (!block.accumulator_shared) all.push_back({"accumulator", *block.accumulator});
    if (block.accumulator_shared && block.accumulator->bytes > shared.bytes) shared = *block.accumulator;
  }
  all.push_back({"shared accumulator", shared});
  for (const TilePlace& tile : plan.tile_places) {
    if (tile.home[index_of(Part::kStates)] != Placement::kHbm) continue;
    all.push_back({"states", {tile.offset[index_of(Part::kStates)], payload_bytes(tile.shape, Part::kStates)}});
  }
  return all;
}

std::vector<Named> host_regions(const Plan& plan, const ModelDescription& model) {
  std::vector<Named> all = {{"chunks", plan.host.chunks},
                            {"buffers", plan.host.buffers},
                            {"record", plan.host.record},
                            {"activations down", plan.activations.down},
                            {"activations up", plan.activations.up},
                            {"norms", plan.host.norms}};
  for (const BlockPlan& block : plan.blocks) {
    if (block.gradient_home == Placement::kHost) all.push_back({"gradient", block.gradient});
    if (!block.accumulator_home) continue;
    EXPECT_FALSE(block.accumulator);
    EXPECT_EQ(block.accumulator_home->bytes, block.partition.trainable_elements * 4);
    EXPECT_LE(block.accumulator_home->bytes, plan.hbm.accumulators.at(0).bytes);
    all.push_back({"accumulator", *block.accumulator_home});
  }
  for (std::size_t a = 0; a < plan.activations.homes.size(); ++a) {
    const auto& [home, offset] = plan.activations.homes[a];
    if (home == Placement::kHost) all.push_back({"activation", {offset, model.activations[a].bytes}});
  }
  for (const Region& passing : plan.host.passing) all.push_back({"passing gradient", passing});
  all.push_back({"spill chunks", plan.host.spill_chunks});
  all.push_back({"overflow", plan.host.overflow});
  for (const TilePlace& tile : plan.tile_places) {
    for (Part part : {Part::kWeights, Part::kStates}) {
      if (tile.home[index_of(part)] != Placement::kHost) continue;
      all.push_back({"tile", {tile.offset[index_of(part)], extent_bytes(tile.shape, part)}});
    }
  }
  return all;
}

// No two overlap, each starts at a page, and together, padded to pages, they are what the ledger says.
void expect_exact(std::vector<Named> regions, const Plan& plan, Placement tier, std::uint64_t budget) {
  std::erase_if(regions, [](const Named& named) { return named.region.bytes == 0; });
  std::ranges::sort(regions, {}, [](const Named& named) { return named.region.offset; });
  std::uint64_t end = 0;
  for (const Named& named : regions) {
    EXPECT_EQ(named.region.offset % kPage, 0u) << named.purpose;
    EXPECT_EQ(named.region.offset, end) << named.purpose << ": overlaps, or leaves a hole";
    end = named.region.offset + align_up(named.region.bytes, kPage);
  }
  EXPECT_EQ(plan.ledger.total(tier), end);
  EXPECT_LE(end, budget);
}

void expect_consistent(const Plan& plan, const ModelDescription& model) {
  expect_exact(hbm_regions(plan), plan, Placement::kHbm, plan.ledger.hbm_budget);
  expect_exact(host_regions(plan, model), plan, Placement::kHost, plan.ledger.host_budget);
  EXPECT_EQ(plan.ledger.total(Placement::kNvme), plan.has_store ? plan.store_bytes : 0);
  EXPECT_EQ(plan.has_store ? disk_bytes(store_shape(plan), 1) : 0, plan.store_bytes);
  EXPECT_LE(plan.store_bytes, plan.ledger.nvme_budget);
  testing::expect_activations(plan, model);
  std::uint64_t spilled = 0;
  for (const TilePlan& tile : plan.tiles) {
    const BlockPlan& block = plan.blocks[tile.block];
    if (block.gradient_home != Placement::kNvme || !tile.range.trainable) {
      EXPECT_EQ(tile.gradient.bytes, 0u);
      continue;
    }
    EXPECT_EQ(tile.gradient.offset, spilled) << "overlaps, or leaves a hole";
    EXPECT_EQ(tile.gradient.offset % kExtentAlignment, 0u);
    EXPECT_GE(tile.gradient.bytes, tile.range.count * size_of(plan.tile_places[0].shape.type));
    EXPECT_LE(tile.gradient.bytes + mover_buffer_bytes(plan.tile_places), plan.host.buffer_bytes);
    spilled += tile.gradient.bytes;
  }
  EXPECT_EQ(plan.spill_bytes, spilled);
  EXPECT_LE(spilled, plan.scratch_bytes);
  EXPECT_EQ(spilled > 0, plan.host.spill_chunks.bytes > 0);
  for (const BlockPlan& block : plan.blocks) {
    if (block.gradient_home) continue;
    ASSERT_FALSE(plan.host.passing.empty());
    EXPECT_LE(block.gradient.bytes, plan.host.passing[0].bytes);
  }
  EXPECT_EQ(plan.host.buffers.bytes, plan.host.buffers_count * plan.host.buffer_bytes);
  if (!plan.hbm.places.empty()) {  // the first takes every block, two more every block but the largest
    std::vector<std::uint64_t> sizes;
    for (const BlockPlan& block : plan.blocks)
      sizes.push_back(block.partition.elements * size_of(plan.tile_places[0].shape.type));
    ASSERT_EQ(plan.hbm.owners.size(), plan.hbm.places.size());
    const std::vector<VisitPlace> planned = planned_visits(plan, plan.hbm);
    for (std::size_t v = 0; v < planned.size(); ++v) {
      EXPECT_LE(sizes[plan.visits[v].block], plan.hbm.places[planned[v].place].bytes);
    }
    const bool some_stay = std::ranges::count(blocks_that_stay(plan), 1) > 0;  // then the others have places
    std::ranges::sort(sizes, std::greater<>());
    EXPECT_TRUE(some_stay || plan.hbm.places[0].bytes >= sizes[0]);
    const auto shared = std::ranges::count_if(plan.hbm.owners, [](const auto& owner) { return !owner; });
    EXPECT_LE(static_cast<std::size_t>(shared), plan.blocks.size());
    for (std::size_t p = 1; p < std::min<std::size_t>(2, plan.hbm.places.size()); ++p) {
      if (plan.hbm.owners[p] || some_stay) continue;
      EXPECT_GE(plan.hbm.places[p].bytes, sizes[1]);
      EXPECT_LT(plan.hbm.places[p].bytes, sizes[1] + 4096);
    }
  }
  for (std::size_t t = 0; t < plan.tiles.size(); ++t) {
    const TilePlace& place = plan.tile_places[t];
    const BlockPlan& block = plan.blocks[plan.tiles[t].block];
    const std::uint64_t bytes = plan.tiles[t].range.first * size_of(place.shape.type);
    EXPECT_EQ(place.hbm_weights.value_or(block.weights.offset + bytes), block.weights.offset + bytes);
    if (place.home[index_of(Part::kWeights)] == Placement::kHbm) {
      EXPECT_EQ(place.offset[index_of(Part::kWeights)], block.weights.offset + bytes);
    }
    EXPECT_LE(extent_bytes(place.shape, Part::kWeights) + extent_bytes(place.shape, Part::kStates),
              plan.host.buffer_bytes);
  }
}

TEST(Plan, RegionsNeverOverlapAndTheLedgerIsWhatTheArenasUse) {
  Random random;
  for (int i = 0; i < 300 && !::testing::Test::HasFailure(); ++i) {
    const ModelDescription model = random.model();
    Config config = random.config();
    const Plan free = make_plan(config, model);
    expect_consistent(free, model);
    // The same with some room, too little for everything to be cached and sometimes for all places.
    config.hbm_bytes = free.ledger.total(Placement::kHbm) + random.below(1 << 20);
    config.host_bytes = free.ledger.total(Placement::kHost) + random.below(16 << 20);
    const Plan roomy = make_plan(config, model);
    expect_consistent(roomy, model);
    EXPECT_EQ(roomy.ledger.hbm_budget, *config.hbm_bytes);
    EXPECT_EQ(roomy.ledger.host_budget, *config.host_bytes);
  }
}

// As a user would: set nothing, be refused, set what the refusal names.
TEST(Plan, ARefusalNamesTheSmallestBudgetThatFits) {
  Random random;
  for (int i = 0; i < 200 && !::testing::Test::HasFailure(); ++i) {
    const ModelDescription model = random.model();
    Config config = random.config();
    const bool store = !config.nvme_paths.empty();
    config.hbm_bytes = config.host_bytes = config.nvme_bytes = random.below(2) * 100;
    for (int refusals = 0; refusals < (store ? 3 : 2); ++refusals) {
      const Error error = refusal(config, model);
      ASSERT_EQ(error.code(), Code::kDoesNotFit) << error.what();
      const std::uint64_t named = testing::named_bytes(error);
      ASSERT_EQ(named % kPage, 0u) << error.what();
      ASSERT_GT(named, 100u) << error.what();
      std::optional<std::uint64_t>& setting = testing::named_setting(config, error);
      ASSERT_LE(*setting, 100u) << "named twice: " << error.what();
      setting = named - kPage;
      const Error less = refusal(config, model);
      EXPECT_EQ(less.parts().object, error.parts().object);
      EXPECT_EQ(testing::named_bytes(less), named);
      setting = named;
    }
    const Plan plan = make_plan(config, model);
    expect_consistent(plan, model);
    EXPECT_EQ(plan.ledger.total(Placement::kHbm), *config.hbm_bytes);
    EXPECT_EQ(plan.ledger.total(Placement::kHost), *config.host_bytes);
  }
}

// Weights in host memory need no chunks, one buffer is all that the update wants; the gradients still go to NVMe.
TEST(Plan, TheNamedBudgetIsEnoughWhereGradientsAreSpilledAndOneBufferIsWanted) {
  Config config = config_for(Placement::kHost, Placement::kHost);
  config.nvme_paths = {"/drive"};
  config.tile_elements = 1 << 16;
  config.knobs.optimizer_buffer_count = 1;
  ModelDescription model;
  for (const char* name : {"h.0", "h.1", "h.2", "h.3"}) {
    model.blocks.push_back({name, {{.name = std::string(name) + ".weight", .shape = {1 << 19, 1}}}});
  }
  config.host_bytes = 1;
  config.host_bytes = testing::named_bytes(refusal(config, model));
  const Plan plan = make_plan(config, model);
  expect_consistent(plan, model);
  EXPECT_GT(plan.spill_bytes, 0u);
}

TEST(Plan, ARefusalSaysWhatIsThereAndWhatIsNeededInFull) {
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.hbm_bytes = 1000;
  const Error error = refusal(config, model_of(3));
  const std::string needed = std::to_string(testing::named_bytes(error) / kKiB) + "KiB";
  EXPECT_EQ(std::string(error.what()), "spillway.hbm_bytes: 1000B is too small: this plan needs at least " + needed +
                                           " of device memory; set spillway.hbm_bytes to \"" + needed + "\" or more");
}

TEST(Plan, HomesFollowTheOffloadDevices) {
  struct Expected {
    Home weights, states, frozen;
    bool copy_in_hbm, gradients_in_hbm;
  };
  const Expected expected[] = {{Placement::kHbm, Placement::kHbm, Placement::kHbm, false, true},
                               {Placement::kHost, Placement::kHost, Placement::kHbm, true, false},
                               {Placement::kNvme, Placement::kNvme, Placement::kHbm, true, false},
                               {Placement::kHost, Placement::kHost, Placement::kHost, false, false},
                               {Placement::kHost, Placement::kNvme, Placement::kHost, false, false},
                               {Placement::kNvme, Placement::kHost, Placement::kNvme, false, false},
                               {Placement::kNvme, Placement::kNvme, Placement::kNvme, false, false}};
  ModelDescription model = model_of(8);
  model.blocks[1].parameters[1].trainable = false;
  for (std::size_t i = 0; i < std::size(kPlacements); ++i) {
    const Plan plan = make_plan(config_for(kPlacements[i].first, kPlacements[i].second), model);
    EXPECT_EQ(plan.gradients_in_hbm, expected[i].gradients_in_hbm);
    EXPECT_EQ(!plan.hbm.places.empty(), kPlacements[i].first != Placement::kHbm);
    for (const TilePlace& tile : plan.tile_places) {
      const Home weights = tile.shape.trainable ? expected[i].weights : expected[i].frozen;
      EXPECT_EQ(tile.home[index_of(Part::kWeights)], weights) << "row " << i;
      EXPECT_EQ(tile.hbm_weights.has_value(), tile.shape.trainable && expected[i].copy_in_hbm) << "row " << i;
      if (!tile.shape.trainable) continue;
      EXPECT_EQ(tile.home[index_of(Part::kStates)], expected[i].states) << "row " << i;
    }
  }
}

TEST(Plan, WhatCannotBeIsRefusedBeforeAnyBudget) {
  const ModelDescription model = model_of(2);
  const auto code = [](const Config& config, const ModelDescription& m) { return refusal(config, m).code(); };
  EXPECT_EQ(code(config_for(Placement::kHost, Placement::kHbm), model), Code::kInvalidArgument);
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.nvme_paths.clear();
  EXPECT_EQ(code(config, model), Code::kInvalidArgument);
  config.nvme_paths.assign(17, "/a");
  EXPECT_EQ(code(config, model), Code::kInvalidArgument);
  config.nvme_paths = {"/a", "/b"};
  config.io_depth = 2048;
  make_plan(config, model);
  config.io_depth = 2049;
  EXPECT_EQ(refusal(config, model).parts().object, "aio.queue_depth");
  for (std::uint64_t tile : {0, 1000, 1025}) {
    config = config_for(Placement::kHbm, Placement::kHbm);
    config.tile_elements = tile;
    EXPECT_EQ(code(config, model), Code::kInvalidArgument);
  }
  for (double epsilon : {0.0, 1e-60, -1.0}) {  // 1e-60 is 0 in fp32
    config = config_for(Placement::kHbm, Placement::kHbm);
    config.optimizer.epsilon = epsilon;
    EXPECT_EQ(code(config, model), Code::kInvalidArgument) << epsilon;
  }
}

TEST(Plan, WithoutVisitsTheOrderIsForwardThenBackward) {
  const Config config = config_for(Placement::kHbm, Placement::kHbm);
  const Plan plan = make_plan(config, model_of(3));
  EXPECT_FALSE(plan.visits_given);
  std::string order;
  for (const Visit& visit : plan.visits) {
    order += (visit.pass == Pass::kForward ? "f" : "b") + std::to_string(visit.block);
  }
  EXPECT_EQ(order, "f0f1f2b2b1b0");
}

// An accumulator is shared only where the plan knows that the block's pushes stand together.
TEST(Plan, BlocksVisitedOnceBackwardShareAnAccumulator) {
  const Config config = config_for(Placement::kNvme, Placement::kNvme);
  ModelDescription model = model_of(3);
  for (Block& block : model.blocks) block.parameters[0].pushes = 2;
  const auto kept = [&] {
    std::vector<bool> shared;
    for (const BlockPlan& block : make_plan(config, model).blocks) shared.push_back(block.accumulator_shared);
    return shared;
  };
  EXPECT_EQ(kept(), std::vector<bool>({false, false, false}));  // the order is not known yet
  model.visits = {{0, Pass::kForward},  {1, Pass::kForward},  {2, Pass::kForward}, {0, Pass::kBackward},
                  {2, Pass::kBackward}, {1, Pass::kBackward}, {0, Pass::kBackward}};
  EXPECT_EQ(kept(), std::vector<bool>({false, true, true}));
  model.blocks[1].parameters[0].pushes = 1;
  EXPECT_EQ(kept(), std::vector<bool>({false, false, true}));
  EXPECT_FALSE(make_plan(config, model).blocks[1].accumulator);
}

// Where micro-batches come one after the other, as in a PyTorch loop.
TEST(Plan, AccumulatorsThatHbmHasNoRoomForTakeTurnsThere) {
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  ModelDescription model = model_of(6);
  for (Block& block : model.blocks) block.parameters[0].pushes = block.parameters[1].pushes = 3;
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    for (std::uint32_t b = 0; b < 6; ++b) model.visits.push_back({b, Pass::kForward});
    for (std::uint32_t b = 6; b-- > 0;) model.visits.push_back({b, Pass::kBackward});
  }
  const auto at_home = [](const Plan& plan) {
    return std::ranges::count_if(plan.blocks, [](const auto& block) { return block.accumulator_home.has_value(); });
  };
  const Plan free = make_plan(config, model);
  EXPECT_EQ(at_home(free), 0);  // without a budget they all stay
  const std::uint64_t one = align_up(free.blocks[0].accumulator->bytes, kPage);

  // With less than that and a place for weights they move, which then have more of them: two stay, four take turns.
  config.hbm_bytes = free.ledger.total(Placement::kHbm) - 2 * free.hbm.places[2].bytes - kPage;
  const Plan fewer = make_plan(config, model);
  expect_consistent(fewer, model);
  EXPECT_EQ(at_home(fewer), 4);
  EXPECT_EQ(fewer.hbm.accumulators.size(), 2u);

  config.hbm_bytes = 1;
  config.hbm_bytes = testing::named_bytes(refusal(config, model));
  EXPECT_LE(*config.hbm_bytes, free.ledger.total(Placement::kHbm) - 5 * one);
  const Plan least = make_plan(config, model);
  expect_consistent(least, model);
  EXPECT_EQ(at_home(least), 6);
  EXPECT_EQ(least.hbm.accumulators.size(), 1u);
  config.host_bytes = 1;  // where they are counted
  EXPECT_GE(testing::named_bytes(refusal(config, model)), 6 * one);
}

// Of the first tiles as large a share is in memory as of all, but for a tile; so the drive has work at any time.
void expect_spread(const Plan& plan, Part part) {
  std::vector<double> seen = {0}, kept = {0};
  double most = 0;
  for (const TilePlace& tile : plan.tile_places) {
    const auto bytes = static_cast<double>(extent_bytes(tile.shape, part));
    most = std::max(most, bytes);
    seen.push_back(seen.back() + bytes);
    kept.push_back(kept.back() + (tile.home[index_of(part)] == Placement::kHost ? bytes : 0));
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_NEAR(kept[i], seen[i] * kept.back() / seen.back(), 2 * most);
  }
}

TEST(Plan, HostMemoryThatIsLeftKeepsAFixedSetWithWeightsFirst) {
  const ModelDescription model = model_of(6);
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.host_bytes = make_plan(config, model).ledger.total(Placement::kHost);  // the pipeline has all that is of use
  const auto kept = [](const Plan& plan, Part part) {
    return std::ranges::count_if(plan.tile_places,
                                 [part](const TilePlace& t) { return t.home[index_of(part)] == Placement::kHost; });
  };
  std::int64_t weights = 0, states = 0;
  const auto tiles = static_cast<std::int64_t>(make_plan(config, model).tiles.size());
  for (int i = 0; states < tiles; ++i, *config.host_bytes += 256 * kKiB) {
    ASSERT_LT(i, 1000) << "a large budget keeps every tile";
    const Plan plan = make_plan(config, model);
    expect_consistent(plan, model);
    EXPECT_GE(kept(plan, Part::kWeights), weights) << "more room never keeps less";
    EXPECT_TRUE(kept(plan, Part::kStates) == 0 || kept(plan, Part::kWeights) == tiles) << "weights are read more often";
    for (const Part part : {Part::kWeights, Part::kStates}) expect_spread(plan, part);
    weights = kept(plan, Part::kWeights);
    states = kept(plan, Part::kStates);
  }
  EXPECT_EQ(weights, tiles);
}

TEST(Plan, DeviceMemoryThatIsLeftKeepsMoreBlocksUntilEveryOneIsFetchedOnce) {
  for (const ModelDescription& model : {model_of(12), testing::uneven_model()}) {
    Config config = config_for(Placement::kNvme, Placement::kNvme);
    const Plan three = make_plan(config, model);
    EXPECT_EQ(three.hbm.places.size(), 3u) << "without a budget no more than the pipeline needs";
    config.hbm_bytes = three.ledger.total(Placement::kHbm);
    std::uint64_t last = testing::fetches(three), all = 0;
    for (const BlockPlan& block : three.blocks) all += block.partition.elements * 2 + 4096;
    for (const std::uint64_t full = *config.hbm_bytes + all; *config.hbm_bytes < full; *config.hbm_bytes += 24 * kKiB) {
      const Plan plan = make_plan(config, model);
      expect_consistent(plan, model);
      EXPECT_LE(testing::fetches(plan), last) << "more room never fetches more: " << *config.hbm_bytes;
      last = testing::fetches(plan);
    }
    EXPECT_EQ(last, model.blocks.size()) << "with room for all, a block is fetched once a step";
  }
}

TEST(Plan, AFullDriveMayTakeOneSlotInstead) {
  const ModelDescription model = model_of(6);
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  const std::uint64_t two = make_plan(config, model).store_bytes;
  config.commit_every = 0;
  const std::uint64_t one = make_plan(config, model).store_bytes;
  EXPECT_EQ(make_plan(config, model).slots, 1u);
  EXPECT_LT(one, two);
  config.commit_every.reset();
  config.nvme_bytes = one;
  EXPECT_NE(refusal(config, model).parts().hint.find("commit_every to 0"), std::string::npos);
  config.nvme_bytes = one - 1;  // then even that is too much, and not promised
  EXPECT_EQ(refusal(config, model).parts().hint.find("commit_every"), std::string::npos);
  config.nvme_bytes = one;
  config.commit_every = 0;
  EXPECT_EQ(make_plan(config, model).store_bytes, one);
}

TEST(Plan, FrozenParametersTakeNoGradientNoStatesAndNoSecondSlot) {
  ModelDescription trained = model_of(3), frozen = model_of(3);
  for (Block& block : frozen.blocks) block.parameters[0].trainable = false;
  frozen.blocks[2].parameters[0].pushes = 0;  // of no meaning: nothing is pushed
  const Config config = config_for(Placement::kNvme, Placement::kNvme);
  const Plan plan = make_plan(config, frozen);
  const std::uint64_t bias = 1024;  // elements, padded
  for (const BlockPlan& block : plan.blocks) {
    EXPECT_EQ(block.gradient.bytes, bias * 2);
    EXPECT_EQ(block.partition.elements, 10 * 1024 + bias);
  }
  std::uint64_t one_slot = 0;
  for (const TilePlace& tile : plan.tile_places) {
    if (tile.shape.trainable) continue;
    EXPECT_EQ(extent_bytes(tile.shape, Part::kStates), 0u);
    one_slot += extent_bytes(tile.shape, Part::kWeights);
  }
  EXPECT_GT(one_slot, 0u);
  const auto& lines = plan.ledger.reservations;
  const auto line = std::ranges::find(lines, "tiles, 2 slots each", &Reservation::purpose);
  ASSERT_NE(line, lines.end());
  std::uint64_t two_slots = 0;
  for (const TilePlace& tile : plan.tile_places) {
    if (!tile.shape.trainable) continue;
    two_slots += 2 * (extent_bytes(tile.shape, Part::kWeights) + extent_bytes(tile.shape, Part::kStates));
  }
  EXPECT_EQ(line->bytes, one_slot + two_slots);
  EXPECT_LT(plan.store_bytes, make_plan(config, trained).store_bytes);
}

TEST(Plan, ATileIsNamedByItsBlockAndFirstParameter) {
  const ModelDescription model = model_of(2);
  const Plan plan = make_plan(config_for(Placement::kHbm, Placement::kHbm), model);
  const std::uint32_t first = plan.blocks[1].first_tile;
  EXPECT_EQ(tile_name(plan, model, first), "tile 0 of block h.1 (h.1.weight)");
  EXPECT_EQ(tile_name(plan, model, first + 2), "tile 2 of block h.1 (h.1.weight …)");
}

}  // namespace
}  // namespace spillway
