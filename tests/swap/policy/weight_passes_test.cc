// Forward passes that follow one another without a step in between, as WeightResidency has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/swap/policy/obedient.h"

namespace spillway {
namespace {

using testing::Actions;
using testing::equal_blocks;
using testing::Kind;
using testing::Obedient;

// Passes of an evaluation or tokens: a step's forward visits, over and over. What each fetched.
std::vector<std::size_t> fetches_of_passes(Obedient& run, std::uint32_t blocks, int passes) {
  std::vector<std::uint32_t> step;
  for (std::uint32_t b = 0; b < blocks; ++b) step.push_back(b);
  for (std::uint32_t b = blocks; b-- > 0;) step.push_back(b);
  std::vector<std::size_t> fetches;
  for (int pass = 0; pass < passes; ++pass) {
    Actions all = pass == 0 ? run.begin(step, blocks) : run.after({.kind = WeightEvent::kAgain});
    for (std::uint32_t b = 0; b < blocks; ++b) {
      const Actions actions = run.visit(b, b);
      all.insert(all.end(), actions.begin(), actions.end());
    }
    fetches.push_back(static_cast<std::size_t>(std::ranges::count(all, Kind::kFetch, &WeightAction::kind)));
  }
  return fetches;
}

TEST(WeightResidency, PassesWithoutAStepInBetweenKeepAFixedSet) {
  for (std::uint32_t places : {1u, 2u, 3u, 4u, 5u, 6u, 8u}) {
    Obedient run(equal_blocks(6, places));
    const auto fetches = fetches_of_passes(run, 6, 8);
    const std::uint32_t taking_turns = places >= 6 ? 0 : std::min(6u, 6 - places + 2);
    for (std::size_t pass = 2; pass < fetches.size(); ++pass) {
      EXPECT_LE(fetches[pass], taking_turns) << places << " places, pass " << pass;
      // One of those that take turns may be there from the pass before.
      EXPECT_GE(fetches[pass] + 1, places > 2 ? taking_turns : 5) << places << " places, pass " << pass;
    }
    EXPECT_EQ(run.policy.hits().visits, 6u) << "of the last pass alone";
    if (places >= 6) {
      EXPECT_EQ(run.policy.hits().hits, 6u);
    }
  }
}

TEST(WeightResidency, ThePassOfAStepBehindThemIsFollowedByItsBackwardPass) {
  for (std::uint32_t places : {2u, 3u, 4u, 6u}) {
    Obedient run(equal_blocks(6, places));
    fetches_of_passes(run, 6, 3);
    std::size_t fetched = 0;
    for (std::uint32_t v = 6; v < 12; ++v) {
      const Actions actions = run.visit(11 - v, v);
      fetched += static_cast<std::size_t>(std::ranges::count(actions, Kind::kFetch, &WeightAction::kind));
      // After the first of them, each is on its way before it is asked for, where there is room.
      if (v > 6 && places > 2) {
        EXPECT_NE(actions.front().kind, Kind::kFetch) << places << " places, visit " << v;
      }
    }
    EXPECT_LE(fetched, 6u);
    if (places == 6) {
      EXPECT_EQ(fetched, 0u);
    }
    EXPECT_TRUE(run.policy.all_acquired());
    EXPECT_EQ(run.policy.hits().visits, 12u);
  }
}

TEST(WeightResidency, NothingIsFetchedForABackwardPassWhilePassesFollowOneAnother) {
  Obedient run(equal_blocks(6, 3));
  fetches_of_passes(run, 6, 3);
  EXPECT_EQ(run.policy.next(), WeightAction{});
  for (std::uint32_t p = 0; p < 3; ++p) EXPECT_FALSE(run.policy.leased(p));
  // The end of the last pass is there, and what stays.
  EXPECT_EQ(run.acquire(5, 6).front().kind, Kind::kLend);
}

// Blocks 0 to 3 are an encoder, the first of them, the embedding, and 4 to 7 a decoder, which then runs alone.
TEST(WeightResidency, WhatPassesLeaveOutIsNotFetchedForThem) {
  const std::vector<std::uint32_t> step = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0};
  Obedient run(equal_blocks(8, 3));
  const auto fetched = [&](Actions all, const std::vector<std::uint32_t>& visits) {
    for (const std::uint32_t b : visits) {
      const Actions actions = run.visit(b, b);
      all.insert(all.end(), actions.begin(), actions.end());
    }
    std::vector<std::uint32_t> blocks;
    for (const WeightAction& action : all) {
      if (action.kind == Kind::kFetch) blocks.push_back(action.block);
    }
    return blocks;
  };
  fetched(run.begin(step, 8), {0, 1, 2, 3, 4, 5, 6, 7});
  for (int token = 0; token < 5; ++token) {
    const auto blocks = fetched(run.after({.kind = WeightEvent::kAgain}), {0, 4, 5, 6, 7});
    if (token < 2) continue;
    EXPECT_LE(blocks.size(), 5u);
    for (const std::uint32_t b : blocks) EXPECT_TRUE(b == 0 || b > 3) << b << " in token " << token;
  }
  // Another text: the encoder's blocks are on their way again before they are asked for.
  run.after({.kind = WeightEvent::kAgain});
  run.visit(0, 0);
  run.visit(1, 1);
  EXPECT_NE(run.acquire(2, 2).front().kind, Kind::kFetch);
}

TEST(WeightResidency, AnUpdateMakesStaleWhatPassesKept) {
  Obedient run(equal_blocks(3, 3));
  fetches_of_passes(run, 3, 3);
  EXPECT_EQ(run.begin({0, 1, 2, 2, 1, 0}, 3).size(), 3u);
}

}  // namespace
}  // namespace spillway
