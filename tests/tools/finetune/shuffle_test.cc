// Each epoch is a permutation, and another one.
#include "tools/finetune/shuffle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace spillway::models::finetune {
namespace {

std::vector<std::uint64_t> epoch(std::uint64_t number, std::uint64_t count, std::uint64_t seed) {
  std::vector<std::uint64_t> rows;
  for (std::uint64_t i = 0; i < count; ++i) rows.push_back(shuffled_row(number * count + i, count, seed));
  return rows;
}

TEST(Shuffle, BringsEveryRowOnceInEveryEpoch) {
  for (const std::uint64_t count : {1u, 2u, 3u, 7u, 16u, 17u, 100u, 1000u, 4097u}) {
    for (std::uint64_t number = 0; number < 4; ++number) {
      std::vector<int> seen(count);
      for (const std::uint64_t row : epoch(number, count, 5)) {
        ASSERT_LT(row, count);
        ++seen[row];
      }
      EXPECT_EQ(seen, std::vector<int>(count, 1)) << count;
    }
  }
}

TEST(Shuffle, DrawsAnotherOrderForEachEpochAndSeed) {
  EXPECT_EQ(epoch(2, 1000, 7), epoch(2, 1000, 7));
  EXPECT_NE(epoch(2, 1000, 7), epoch(3, 1000, 7));
  EXPECT_NE(epoch(2, 1000, 7), epoch(2, 1000, 8));
}

// Of many orders of 16 rows each row comes first about as often as any other.
TEST(Shuffle, FavoursNoRow) {
  constexpr std::uint64_t kRows = 16, kOrders = 32'000;
  std::vector<double> first(kRows);
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) ++first[shuffled_row(0, kRows, seed)];
  double chi = 0;
  for (const double count : first) chi += std::pow(count - kOrders / kRows, 2) / (kOrders / kRows);
  EXPECT_LT(chi, 45) << "with 15 degrees of freedom 37.7 is exceeded once in a thousand draws";
}

}  // namespace
}  // namespace spillway::models::finetune
