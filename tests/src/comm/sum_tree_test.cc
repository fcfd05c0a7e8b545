#include "src/comm/sum_tree.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "swap/policy/part_sums.h"
#include "tests/seed.h"

namespace spillway {
namespace {

std::vector<std::vector<float>> random_parts(std::size_t parts, std::size_t count) {
  std::mt19937_64 random(test_seed());
  std::vector<std::vector<float>> values(parts, std::vector<float>(count));
  for (auto& part : values) {
    for (float& value : part) {
      value = std::ldexp(static_cast<float>(random() % 20'001) / 10'000 - 1, static_cast<int>(random() % 12));
    }
  }
  return values;
}

std::vector<const float*> places(const std::vector<std::vector<float>>& parts) {
  std::vector<const float*> at;
  for (const auto& part : parts) at.push_back(part.data());
  return at;
}

// As the header has it, halves of halves.
float tree_of(std::span<const std::vector<float>> parts, std::size_t at) {
  if (parts.size() == 1) return parts[0][at];
  const std::size_t first = std::bit_ceil(parts.size()) / 2;
  return tree_of(parts.first(first), at) + tree_of(parts.subspan(first), at);
}

TEST(SumTree, HasTheDefinitionsBits) {
  for (std::size_t parts = 1; parts <= 33; ++parts) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{2048}, std::size_t{5'003}}) {
      const auto values = random_parts(parts, count);
      std::vector<float> sum(count);
      sum_in_tree(places(values), sum.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(sum[i]), std::bit_cast<std::uint32_t>(tree_of(values, i))) << parts;
      }
    }
  }
}

TEST(SumTree, FourPartsArePairs) {
  const auto p = random_parts(4, 1'000);
  std::vector<float> sum(1'000);
  sum_in_tree(places(p), sum.data(), sum.size());
  int differ = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    ASSERT_EQ(sum[i], (p[0][i] + p[1][i]) + (p[2][i] + p[3][i]));
    differ += sum[i] != ((p[0][i] + p[1][i]) + p[2][i]) + p[3][i];
  }
  EXPECT_GT(differ, 100) << "values whose order of additions does not show prove nothing";
}

TEST(SumTree, MayBeWrittenOverAnyPart) {
  for (std::size_t over = 0; over < 5; ++over) {
    auto values = random_parts(5, 3'000);
    std::vector<float> sum(3'000);
    sum_in_tree(places(values), sum.data(), sum.size());
    sum_in_tree(places(values), values[over].data(), sum.size());
    EXPECT_EQ(values[over], sum);
  }
}

// A power of two of contiguous parts on each rank: their folds fold to the tree over all.
TEST(SumTree, OfTreesIsTheTree) {
  const auto values = random_parts(16, 4'000);
  const auto at = places(values);
  std::vector<float> whole(4'000);
  sum_in_tree(at, whole.data(), whole.size());
  for (const std::size_t ranks : {2u, 4u, 8u, 16u}) {
    std::vector<std::vector<float>> of_rank(ranks, std::vector<float>(4'000));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      sum_in_tree(std::span(at).subspan(rank * 16 / ranks, 16 / ranks), of_rank[rank].data(), 4'000);
    }
    std::vector<float> sum(4'000);
    sum_in_tree(places(of_rank), sum.data(), sum.size());
    EXPECT_EQ(sum, whole) << ranks;
  }
}

// With which a rank puts its own parts together: the tree over ranks goes on where that one ends.
TEST(SumTree, IsTheOneOfAStepsParts) {
  for (const std::uint32_t parts : {1u, 2u, 4u, 8u, 16u}) {
    const auto values = random_parts(parts, 3'000);
    std::vector<float> expected(3'000);
    sum_in_tree(places(values), expected.data(), expected.size());
    for (const bool in_order : {true, false}) {
      PartSums tree(parts, in_order);
      std::vector<std::vector<float>> slots(PartSums::slots(parts, in_order), std::vector<float>(3'000));
      const auto zero = [&](std::uint32_t slot) { slots[slot].assign(3'000, 0.0f); };
      const auto add = [&](std::uint32_t into, std::uint32_t from) {
        for (std::size_t i = 0; i < 3'000; ++i) slots[into][i] += slots[from][i];
      };
      tree.begin_step();
      for (std::uint32_t part = 0; part < parts; ++part) slots[tree.open(part, zero, add).slot] = values[part];
      tree.finish(zero, add);
      EXPECT_EQ(slots[0], expected) << parts << " parts, " << (in_order ? "in order" : "in any order");
    }
  }
}

TEST(FoldInTree, GoesInTheSameOrder) {
  for (std::size_t parts = 1; parts <= 40; ++parts) {
    const auto values = random_parts(parts, 1);
    const float folded = fold_in_tree(
        parts, [&](std::size_t part) { return values[part][0]; }, [](float a, float b) { return a + b; });
    EXPECT_EQ(folded, tree_of(values, 0)) << parts;
  }
}

}  // namespace
}  // namespace spillway
