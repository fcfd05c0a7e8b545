#include "swap/policy/residency.h"
#include "tests/seed.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace spillway {
namespace {

std::vector<std::uint32_t> gpt2_visits(std::uint32_t layers) {
  std::vector<std::uint32_t> visits;
  for (std::uint32_t b = 0; b <= layers; ++b) visits.push_back(b);
  visits.push_back(0);
  for (std::uint32_t b = layers; b > 0; --b) visits.push_back(b);
  visits.push_back(0);
  return visits;
}

std::vector<VisitPlace> assign_equal(const std::vector<std::uint32_t>& visits, std::uint32_t places) {
  return assign_places(visits, std::vector<std::uint64_t>(8, 100), std::vector<std::uint64_t>(places, 100));
}

std::size_t fetches(const std::vector<VisitPlace>& plan) {
  std::size_t count = 0;
  for (const VisitPlace& visit : plan) count += visit.fetch;
  return count;
}

// Whatever the order and the number of places: a hit finds its block, and `after` is the place's last user.
TEST(Residency, AHitAlwaysFindsItsBlock) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 2000; ++round) {
    const auto places = static_cast<std::uint32_t>(1 + random() % 5);
    std::vector<std::uint32_t> visits(1 + random() % 40);
    for (auto& block : visits) block = static_cast<std::uint32_t>(random() % 8);
    std::vector<std::uint64_t> block_bytes(8), place_bytes(places);
    for (auto& bytes : block_bytes) bytes = 1 + random() % 100;
    for (auto& bytes : place_bytes) bytes = 1 + random() % 100;
    place_bytes[random() % places] = 100;
    const auto plan = assign_places(visits, block_bytes, place_bytes);
    std::vector<std::optional<std::uint32_t>> held(places), last(places);
    for (std::uint32_t v = 0; v < visits.size(); ++v) {
      ASSERT_LT(plan[v].place, places);
      EXPECT_LE(block_bytes[visits[v]], place_bytes[plan[v].place]);
      EXPECT_EQ(plan[v].after, last[plan[v].place]);
      if (!plan[v].fetch) {
        EXPECT_EQ(held[plan[v].place], visits[v]);
      }
      held[plan[v].place] = visits[v];
      last[plan[v].place] = v;
    }
  }
}

TEST(Residency, WithTwoPlacesOrMoreAFetchNeverWaitsForTheVisitJustBefore) {
  for (std::uint32_t places : {2u, 3u, 4u}) {
    const auto visits = gpt2_visits(6);
    const auto plan = assign_equal(visits, places);
    for (std::size_t v = 1; v < visits.size(); ++v) {
      if (plan[v].fetch && plan[v].after) {
        EXPECT_LT(*plan[v].after + 1, v) << "visit " << v << " with " << places << " places";
      }
    }
  }
}

// As a tied embedding: it stays in the one place that has room for it while the layers take turns in the others.
TEST(Residency, ABlockThatFitsOnlyOnePlaceKeepsItWhileOthersHaveTheirOwn) {
  std::vector<std::uint64_t> block_bytes(7, 10);
  block_bytes[0] = 100;
  const auto visits = gpt2_visits(6);
  const auto plan = assign_places(visits, block_bytes, std::vector<std::uint64_t>{100, 10, 10});
  for (std::size_t v = 0; v < visits.size(); ++v) {
    EXPECT_EQ(plan[v].place == 0, visits[v] == 0) << "visit " << v;
    if (v > 0 && visits[v] == 0) {
      EXPECT_FALSE(plan[v].fetch) << "visit " << v;
    }
  }
}

TEST(Residency, EverythingIsFetchedOnceWhenEverythingFits) { EXPECT_EQ(fetches(assign_equal(gpt2_visits(6), 7)), 7u); }

// One place: every visit but a repeated one is a fetch. The turn from the last layer to the head and back saves
// nothing.
TEST(Residency, OnePlaceFetchesEveryVisit) {
  EXPECT_EQ(fetches(assign_equal(gpt2_visits(6), 1)), gpt2_visits(6).size());
}

// What was promised a place keeps it; the others share the rest as if it were not there.
TEST(Residency, AnOwnedPlaceIsUsedByItsBlockAlone) {
  const auto visits = gpt2_visits(6);
  const std::vector<std::uint64_t> block_bytes(8, 100);
  const std::vector<std::optional<std::uint32_t>> owners = {std::nullopt, 3u, std::nullopt};
  const auto plan = assign_places(visits, block_bytes, std::vector<std::uint64_t>(3, 100), {.owners = owners});
  std::size_t fetched = 0;
  for (std::size_t v = 0; v < visits.size(); ++v) {
    EXPECT_EQ(plan[v].place == 1, visits[v] == 3) << "visit " << v;
    if (visits[v] == 3) fetched += plan[v].fetch;
  }
  EXPECT_EQ(fetched, 1u);
}

// What is there from the step before is not fetched, and only what a frozen block owns may be.
TEST(Residency, AFrozenBlockIsThereInTheNextStep) {
  const std::vector<std::uint32_t> visits = {0, 1, 2, 3};
  const std::vector<std::optional<std::uint32_t>> owners = {std::nullopt, 1u, 3u};
  const auto filled = places_that_stay(owners, std::vector<std::uint8_t>{1, 1, 1, 0});
  EXPECT_EQ(filled, (std::vector<std::uint8_t>{0, 1, 0}));
  const auto plan = assign_places(visits, std::vector<std::uint64_t>(4, 100), std::vector<std::uint64_t>(3, 100),
                                  {.owners = owners, .filled = filled});
  for (std::size_t v = 0; v < visits.size(); ++v) EXPECT_EQ(plan[v].fetch, visits[v] != 1) << "visit " << v;
  EXPECT_EQ(plan[1].place, 1u);
  EXPECT_EQ(plan[1].after, std::nullopt);
}

TEST(Residency, ABlockLeavesWhenSoMuchIsVisitedBeforeItIsWantedAgain) {
  const auto visits = gpt2_visits(3);  // 0 1 2 3 0 3 2 1 0
  const auto fetched = [&](std::uint64_t reuse_bytes, const std::vector<std::optional<std::uint32_t>>& owners = {}) {
    const auto plan = assign_places(visits, std::vector<std::uint64_t>(4, 100), std::vector<std::uint64_t>(4, 100),
                                    {.owners = owners, .reuse_bytes = reuse_bytes});
    std::string text;
    for (const VisitPlace& visit : plan) text += visit.fetch ? 'f' : visit.leaves ? 'L' : '-';
    return text;
  };
  EXPECT_EQ(fetched(UINT64_MAX), "ffff-----");
  EXPECT_EQ(fetched(501), "ffff-----");
  EXPECT_EQ(fetched(500), "ffff---f-") << "500 bytes lie between the visits of block 1";
  EXPECT_EQ(fetched(101), "fffff-fff");
  EXPECT_EQ(fetched(100), "fffffffff");
  EXPECT_EQ(fetched(100, {{}, 1u, {}, {}}), "fffffff-f") << "a block stays in its own place";
}

}  // namespace
}  // namespace spillway
