#include "swap/policy/activation_residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/seed.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

using testing::random_uses;
using testing::transformer_uses;

std::mt19937_64 seeded() { return std::mt19937_64(test_seed()); }

std::size_t moves(const std::vector<UsePlace>& plan) {
  std::size_t count = 0;
  for (const UsePlace& use : plan) count += use.fetch + use.spill;
  return count;
}

// Follows the plan with version numbers for bytes: every read sees the last write.
void expect_right(const std::vector<ActivationUse>& uses, std::uint32_t held, std::uint32_t places) {
  const auto plan = assign_activations(uses, held, places);
  ASSERT_EQ(plan.size(), uses.size());
  std::map<std::uint32_t, int> newest, home;  // versions of activations
  struct PlaceState {
    std::optional<std::uint32_t> activation, last_use;
    int version = 0;
  };
  std::vector<PlaceState> hbm(places);
  for (std::uint32_t u = 0; u < uses.size(); ++u) {
    const ActivationUse& use = uses[u];
    ASSERT_LT(plan[u].place, places);
    for (std::uint32_t before = u >= held ? u - held + 1 : 0; before < u; ++before) {
      // Uses that overlap do not take each other's places.
      if (uses[before].activation != use.activation) {
        EXPECT_NE(plan[before].place, plan[u].place) << "uses " << before << " and " << u;
      }
    }
    PlaceState& place = hbm[plan[u].place];
    if (place.activation != use.activation) {
      EXPECT_EQ(plan[u].after, place.last_use);
      EXPECT_EQ(plan[u].fetch, use.access != Access::kWrite);
      if (plan[u].fetch) {
        EXPECT_EQ(uses[plan[u].previous].activation, use.activation);
        EXPECT_LT(plan[u].previous, u);
        EXPECT_EQ(home.at(use.activation), newest.at(use.activation)) << "use " << u << " fetches old bytes";
        place.version = home[use.activation];
      }
    } else {
      EXPECT_FALSE(plan[u].fetch);
    }
    for (const PlaceState& other : hbm) EXPECT_TRUE(&other == &place || other.activation != use.activation);
    place.activation = use.activation;
    place.last_use = u;
    if (use.access != Access::kWrite) {
      EXPECT_EQ(place.version, newest[use.activation]) << "use " << u;
    }
    if (use.access != Access::kRead) place.version = ++newest[use.activation];
    if (plan[u].spill) {
      EXPECT_NE(home[use.activation], place.version) << "use " << u << " spills what is at home";
      home[use.activation] = place.version;
      place.activation.reset();
    }
  }
}

TEST(ActivationResidency, EveryReadSeesTheLastWriteWhateverTheOrder) {
  auto random = seeded();
  for (int round = 0; round < 3000 && !::testing::Test::HasFailure(); ++round) {
    const auto held = static_cast<std::uint32_t>(1 + random() % 3);
    const auto places = held + static_cast<std::uint32_t>(random() % 6);
    expect_right(random_uses(random, static_cast<std::uint32_t>(1 + random() % 8)), held, places);
  }
  for (std::uint32_t micro_batches : {1u, 2u, 8u}) {
    for (std::uint32_t places = 2; places <= 5 * micro_batches; ++places) {
      expect_right(transformer_uses(4, micro_batches), 2, places);
    }
  }
}

TEST(ActivationResidency, NothingMovesWhenEverythingFits) {
  auto random = seeded();
  for (int round = 0; round < 200; ++round) EXPECT_EQ(moves(assign_activations(random_uses(random, 6), 1, 6)), 0u);
  EXPECT_EQ(moves(assign_activations(transformer_uses(4, 3), 2, 15)), 0u);
}

// One micro-batch: what is written in forward goes down once and comes up once, but for what the places keep at the
// turn; the gradient never leaves.
TEST(ActivationResidency, ATransformersInputsMoveOnceEachWay) {
  const std::uint32_t layers = 20;
  for (std::uint32_t places : {4u, 6u, 10u}) {
    const auto uses = transformer_uses(layers, 1);
    const auto plan = assign_activations(uses, 2, places);
    std::map<std::uint32_t, int> spills, fetches;
    for (std::size_t u = 0; u < uses.size(); ++u) {
      spills[uses[u].activation] += plan[u].spill;
      fetches[uses[u].activation] += plan[u].fetch;
    }
    for (std::uint32_t l = 0; l <= layers; ++l) {
      EXPECT_LE(spills[l], 1) << "layer " << l;
      EXPECT_EQ(spills[l], fetches[l]) << "layer " << l;
    }
    EXPECT_EQ(spills[layers], 0);
    EXPECT_GE(moves(plan), 2 * (layers + 1 - places));
    EXPECT_LE(moves(plan), 2 * (layers + 4 - places));  // some places are spared for what is on its way
  }
}

TEST(ActivationResidency, MorePlacesNeverMoveMoreThanTheLeast) {
  for (std::uint32_t micro_batches : {1u, 4u, 8u}) {
    const auto uses = transformer_uses(6, micro_batches);
    const std::size_t most = moves(assign_activations(uses, 2, 2));
    std::size_t fewest = most;
    for (std::uint32_t places = 3; places <= 7 * micro_batches; ++places) {
      fewest = std::min(fewest, moves(assign_activations(uses, 2, places)));
      EXPECT_LE(moves(assign_activations(uses, 2, places)), most) << places << " places";
    }
    EXPECT_EQ(fewest, 0u);
  }
}

// With room for it, a fetch has a place that was given back before the operation just before.
TEST(ActivationResidency, AFetchNeverWaitsForTheUsesJustBefore) {
  for (std::uint32_t places : {4u, 5u, 8u, 20u}) {
    for (std::uint32_t micro_batches : {1u, 3u, 8u}) {
      const auto plan = assign_activations(transformer_uses(6, micro_batches), 2, places);
      for (std::uint32_t u = 0; u < plan.size(); ++u) {
        if (plan[u].fetch && plan[u].after) {
          EXPECT_LT(*plan[u].after + 3, u) << "use " << u << " with " << places << " places";
        }
      }
    }
  }
}

}  // namespace
}  // namespace spillway
