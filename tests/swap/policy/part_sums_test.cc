// PartSums: in whatever order parts are added to, the sum is that of the balanced binary tree over them, bit for bit.
#include "swap/policy/part_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

namespace spillway {
namespace {

// The definition: neighbours are added, then their sums, until there is one.
float tree(std::vector<float> parts) {
  while (parts.size() > 1) {
    for (std::size_t i = 0; i < parts.size() / 2; ++i) parts[i] = parts[2 * i] + parts[2 * i + 1];
    parts.resize(parts.size() / 2);
  }
  return parts[0];
}

// Slots of sums, which hold anything before they are written.
struct Sums {
  std::vector<float> slot;

  explicit Sums(std::size_t slots) : slot(slots, NAN) {}
  auto zero() {
    return [this](std::uint32_t at) { slot.at(at) = 0; };
  }
  auto combine() {
    return [this](std::uint32_t into, std::uint32_t from) { slot.at(into) += slot.at(from); };
  }
  void add(PartSums& tree, std::uint32_t part, float value) {
    const PartSums::At at = tree.open(part, zero(), combine());
    slot.at(at.slot) = at.first ? value : slot.at(at.slot) + value;
  }
  float finish(PartSums& tree) {
    tree.finish(zero(), combine());
    return slot[0];
  }
};

struct Value {
  std::uint32_t part;
  float value;
};

// Of very different sizes, so that another order gives other bits; some parts get none.
std::vector<Value> random_values(std::uint32_t parts, std::mt19937& random) {
  std::vector<Value> values;
  for (std::uint32_t part = 0; part < parts; ++part) {
    for (auto left = random() % 4; left > 0; --left) {
      const int power = static_cast<int>(random() % 40) - 20;
      values.push_back({part, std::ldexp(static_cast<float>(random() % 2000) - 1000, power)});
    }
  }
  return values;
}

float wanted(std::uint32_t parts, const std::vector<Value>& values) {
  std::vector<float> sums(parts, 0);
  std::vector<bool> any(parts, false);
  for (const Value& v : values) {
    sums[v.part] = any[v.part] ? sums[v.part] + v.value : v.value;
    any[v.part] = true;
  }
  return tree(sums);
}

TEST(PartSums, AreTheBalancedTreeInFewSlots) {
  std::mt19937 random(1);
  for (std::uint32_t parts = 1; parts <= 64; parts *= 2) {
    PartSums tree(parts, true);
    ASSERT_EQ(PartSums::slots(parts, true), static_cast<std::uint32_t>(std::log2(parts)) + 1);
    for (int step = 0; step < 200; ++step) {
      const auto values = random_values(parts, random);
      Sums sums(PartSums::slots(parts, true));
      tree.begin_step();
      for (const Value& v : values) {
        EXPECT_TRUE(tree.takes(v.part));
        sums.add(tree, v.part, v.value);
      }
      ASSERT_EQ(sums.finish(tree), wanted(parts, values)) << parts << " parts, step " << step;
    }
  }
}

TEST(PartSums, PartsInAnyOrderHaveASlotEach) {
  std::mt19937 random(2);
  for (std::uint32_t parts = 1; parts <= 64; parts *= 2) {
    PartSums tree(parts, false);
    ASSERT_EQ(PartSums::slots(parts, false), parts);
    for (int step = 0; step < 200; ++step) {
      auto values = random_values(parts, random);
      const float sum = wanted(parts, values);
      std::vector<std::uint32_t> order(parts);
      std::iota(order.begin(), order.end(), 0u);
      std::ranges::shuffle(order, random);
      std::ranges::stable_sort(values, {}, [&](const Value& v) { return order[v.part]; });
      Sums sums(parts);
      tree.begin_step();
      for (const Value& v : values) {
        EXPECT_TRUE(tree.takes(v.part));
        sums.add(tree, v.part, v.value);
      }
      ASSERT_EQ(sums.finish(tree), sum) << parts << " parts, step " << step;
    }
  }
}

TEST(PartSums, APartThatWasCombinedTakesNoMore) {
  PartSums tree(4, true);
  Sums sums(3);
  tree.begin_step();
  sums.add(tree, 0, 1);
  EXPECT_TRUE(tree.takes(0));
  sums.add(tree, 2, 1);
  EXPECT_FALSE(tree.takes(1));
  EXPECT_TRUE(tree.takes(2));
  tree.begin_step();
  EXPECT_TRUE(tree.takes(0));
}

}  // namespace
}  // namespace spillway
