#include "swap/tensors/free_ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/seed.h"

namespace spillway {
namespace {

TEST(FreeRanges, TheSmallestThatHoldsItIsTaken) {
  FreeRanges free(0, 100);
  ASSERT_TRUE(free.take_at({10, 20}));
  ASSERT_TRUE(free.take_at({50, 40}));  // free: [0, 10) [30, 50) [90, 100)
  EXPECT_EQ(40u, free.free_bytes());
  EXPECT_EQ(0u, free.take(8)->offset);
  EXPECT_EQ(90u, free.take(10)->offset);
  EXPECT_EQ(30u, free.take(11)->offset);
  EXPECT_FALSE(free.take(10));
}

TEST(FreeRanges, WhatFitsNowhereIsTakenInParts) {
  FreeRanges free(0, 100);
  ASSERT_TRUE(free.take_at({10, 20}));
  ASSERT_TRUE(free.take_at({50, 40}));
  EXPECT_TRUE(free.take_in_parts(41).empty());
  const auto parts = free.take_in_parts(35);
  ASSERT_EQ(3u, parts.size());
  EXPECT_EQ(30u, parts[0].offset);
  EXPECT_EQ(20u, parts[0].bytes);
  EXPECT_EQ(5u, free.free_bytes());
}

TEST(FreeRanges, WhatIsTakenIsNotTakenAgain) {
  FreeRanges free(10, 100);
  EXPECT_FALSE(free.take_at({0, 20}));
  EXPECT_FALSE(free.take_at({90, 11}));
  EXPECT_FALSE(free.take_at({UINT64_MAX, 2}));
  EXPECT_TRUE(free.take_at({20, 10}));
  EXPECT_FALSE(free.take_at({29, 1}));
  EXPECT_FALSE(free.take_at({10, 11}));
  EXPECT_TRUE(free.take_at({10, 10}));
}

TEST(FreeRanges, KnowsWhatTheLargestHold) {
  FreeRanges free(0, 100);
  EXPECT_EQ(free.free_bytes_in(1), 100u);
  EXPECT_EQ(free.free_bytes_in(0), 0u);
  EXPECT_TRUE(free.take_at({10, 10}) && free.take_at({50, 10}));  // leaves 10, 30 and 40
  EXPECT_EQ(free.free_bytes_in(1), 40u);
  EXPECT_EQ(free.free_bytes_in(2), 70u);
  EXPECT_EQ(free.free_bytes_in(3), 80u);
  EXPECT_EQ(free.free_bytes_in(4), 80u);
}

// Against a bit for each unit.
TEST(FreeRanges, KeepsWhatARandomProgramTakes) {
  std::mt19937_64 random(test_seed());
  constexpr std::uint64_t kUnits = 200;
  FreeRanges free(0, kUnits);
  std::vector<bool> taken(kUnits);
  std::vector<Extent> held;
  const auto mark = [&](const Extent& range, bool value) {
    for (std::uint64_t i = range.offset; i < range.offset + range.bytes; ++i) {
      ASSERT_NE(value, taken[i]) << i;
      taken[i] = value;
    }
  };
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 2 == 0 && !held.empty()) {
      const std::size_t which = random() % held.size();
      mark(held[which], false);
      free.give_back(held[which]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (const std::uint64_t bytes = 1 + random() % 20; random() % 2 == 0) {
      const auto range = free.take(bytes);
      if (range) mark(*range, true), held.push_back(*range);
    } else {
      std::uint64_t sum = 0;
      for (const Extent& part : free.take_in_parts(bytes)) mark(part, true), held.push_back(part), sum += part.bytes;
      ASSERT_TRUE(sum == bytes || (sum == 0 && free.free_bytes() < bytes)) << sum;
    }
    ASSERT_EQ(static_cast<std::uint64_t>(std::count(taken.begin(), taken.end(), false)), free.free_bytes());
  }
}

}  // namespace
}  // namespace spillway
