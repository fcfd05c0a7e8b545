#include "swap/policy/pass_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/seed.h"

namespace spillway {
namespace {

using Owners = std::vector<std::optional<std::uint32_t>>;

std::vector<std::uint32_t> forward(std::uint32_t blocks) {
  std::vector<std::uint32_t> visits;
  for (std::uint32_t b = 0; b < blocks; ++b) visits.push_back(b);
  return visits;
}

TEST(PassPlaces, InPassesAFixedSetOwnsAllPlacesButTwo) {
  const std::vector<std::uint64_t> blocks(6, 100);
  const auto owned = [&](std::size_t places, const ResidencyRules& rules = {}) {
    const auto owners = owners_in_passes(forward(6), blocks, std::vector<std::uint64_t>(places, 100), rules);
    return owners.size() - static_cast<std::size_t>(std::ranges::count(owners, std::optional<std::uint32_t>()));
  };
  for (std::size_t places = 1; places < 6; ++places) EXPECT_EQ(owned(places), places < 2 ? 0 : places - 2) << places;
  for (std::size_t places = 6; places < 9; ++places) EXPECT_EQ(owned(places), 6u);
  EXPECT_EQ(owned(6, {.reuse_bytes = 500}), 0u);
  EXPECT_EQ(owned(6, {.reuse_bytes = 501}), 6u);
}

TEST(PassPlaces, InPassesTheLargestBlocksHaveTwoPlacesToTakeTurnsIn) {
  std::vector<std::uint64_t> blocks = {500, 100, 100, 100, 100, 400};
  EXPECT_EQ(owners_in_passes(forward(6), blocks, std::vector<std::uint64_t>{500, 400, 400, 100}),
            (Owners{0, std::nullopt, std::nullopt, 1}));
  // An embedding that is tied to the head is visited twice.
  std::vector<std::uint32_t> visits = forward(5);
  visits.push_back(0);
  blocks.pop_back();
  EXPECT_EQ(owners_in_passes(visits, blocks, std::vector<std::uint64_t>{500, 100, 100}),
            (Owners{0, std::nullopt, std::nullopt}));
  EXPECT_EQ(owners_in_passes(visits, blocks, std::vector<std::uint64_t>{500, 100}),
            (Owners{std::nullopt, std::nullopt}));
  const Owners given = {std::nullopt, std::nullopt, std::nullopt, 3};
  EXPECT_EQ(owners_in_passes(visits, blocks, std::vector<std::uint64_t>{500, 100, 100, 100}, {.owners = given}),
            (Owners{0, std::nullopt, std::nullopt, 3}));
}

// Whatever sizes: those that have no place of their own find one, and each block has at most one.
TEST(PassPlaces, InPassesEveryBlockFindsAPlace) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::uint32_t> visits(1 + random() % 20);
    for (auto& block : visits) block = static_cast<std::uint32_t>(random() % 8);
    std::vector<std::uint64_t> block_bytes(8), place_bytes(1 + random() % 9);
    for (auto& bytes : block_bytes) bytes = 1 + random() % 100;
    for (auto& bytes : place_bytes) bytes = 1 + random() % 100;
    place_bytes[random() % place_bytes.size()] = 100;
    const Owners owners = owners_in_passes(visits, block_bytes, place_bytes);
    std::vector<int> places(8);
    for (std::size_t p = 0; p < owners.size(); ++p) {
      if (!owners[p]) continue;
      EXPECT_LE(block_bytes[*owners[p]], place_bytes[p]);
      EXPECT_EQ(++places[*owners[p]], 1);
    }
    assign_places(visits, block_bytes, place_bytes, {.owners = owners});  // checks itself
  }
}

}  // namespace
}  // namespace spillway
