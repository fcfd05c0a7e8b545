#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/optimizer.h"
#include "tests/kernels/host_float_settings.h"
#include "tests/kernels/reduced_tile.h"

namespace spillway {
namespace {

void expect_same(const ReducedTile& got, const ReducedTile& want, const std::string& where) {
  ASSERT_EQ(got.weights.weight, want.weights.weight) << where;
  ASSERT_EQ(got.weights.residual, want.weights.residual) << where;
  for (std::size_t i = 0; i < want.weights.master.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got.weights.master[i]),
              std::bit_cast<std::uint32_t>(want.weights.master[i]));
  ASSERT_EQ(got.exp_avg, want.exp_avg) << where;
  ASSERT_EQ(got.exp_avg_sq, want.exp_avg_sq) << where;
  ASSERT_EQ(got.exp_avg_scales, want.exp_avg_scales) << where;
  ASSERT_EQ(got.exp_avg_sq_scales, want.exp_avg_sq_scales) << where;
}

std::vector<OptimizerTarget> all_targets() {
  auto targets = optimizer_targets();
  targets.push_back({"dispatched", optimizer_update});
  targets.push_back({"piece", optimizer_update_piece});
  return targets;
}

class ReducedMomentsOf : public ::testing::TestWithParam<std::tuple<OptimizerKind, DType, MomentFormat>> {
 protected:
  OptimizerKind kind() const { return std::get<0>(GetParam()); }
  DType type() const { return std::get<1>(GetParam()); }
  MomentFormat format() const { return std::get<2>(GetParam()); }
  std::vector<OptimizerConfig> configurations() const {
    std::vector<OptimizerConfig> all;
    for (const double decay : {0.0, 0.1}) {
      OptimizerConfig config{.kind = kind(), .learning_rate = 3e-4, .beta2 = 0.95, .weight_decay = decay, .seed = 5};
      all.push_back(config);
      config.decoupled_decay = false, config.beta2 = 0.999;
      if (kind() == OptimizerKind::kAdam) all.push_back(config);
    }
    return all;
  }
  ReducedTile random(std::size_t count, std::mt19937_64& generator) const {
    return random_reduced(type(), kind(), format(), count, generator);
  }
};

TEST_P(ReducedMomentsOf, AllTargetsGiveTheBitsOfTheReference) {
  std::string names;
  for (const OptimizerTarget& target : optimizer_targets()) names += std::string(target.name) + ' ';
  RecordProperty("targets", names);  // tools/check_aarch64.sh shows which ones ran
  auto generator = seeded_generator();
  const std::size_t count = 20'011;
  for (const OptimizerConfig& config : configurations()) {
    ReducedTile expected = random(count, generator);
    expected.index = (std::uint64_t{1} << 32) - 5'000;  // the upper half of an index counts, too
    const ReducedTile start = expected;
    const OptimizerScalars scalars = optimizer_scalars(config, 1 + generator() % 100, 0.37);
    const bool finite = optimizer_update_reference(expected.view(), scalars, 0, count);
    if (type() != DType::kFloat16) {
      ASSERT_TRUE(finite) << "the input is chosen so that nothing overflows";
    }
    for (const OptimizerTarget& target : all_targets()) {
      ReducedTile tile = start;
      EXPECT_EQ(target.update(tile.view(), scalars, 0, count), finite) << target.name;
      expect_same(tile, expected, std::string(target.name));
      EXPECT_EQ(tile.weights.gradient, start.weights.gradient) << "a gradient is read only";
    }
  }
}

TEST_P(ReducedMomentsOf, FlushToZeroOfTheHostProgramChangesNoBits) {
  auto generator = seeded_generator();
  const std::size_t count = 4'099;
  const OptimizerScalars scalars = optimizer_scalars(configurations().back(), 3, 0.5);
  ReducedTile expected = random(count, generator);
  const ReducedTile start = expected;
  optimizer_update_reference(expected.view(), scalars, 0, count);
  for (const OptimizerTarget& target : all_targets()) {
    ReducedTile tile = start;
    const FloatSettings saved = float_settings();
    set_float_settings(saved | kHostFloatSettings);
    target.update(tile.view(), scalars, 0, count);
    set_float_settings(saved);
    expect_same(tile, expected, std::string(target.name));
  }
}

// Whoever takes which part of a tile, and wherever the tile starts: bits depend on the element's index alone.
TEST_P(ReducedMomentsOf, AnySplitAndAnyTileGiveTheSameBits) {
  auto generator = seeded_generator();
  const std::size_t count = 1'500, unit = format() == MomentFormat::kInt8 ? 32 : 1;
  const ReducedTile start = random(count, generator);
  const OptimizerScalars scalars = optimizer_scalars(configurations().back(), 7, 1.0);
  ReducedTile all = start;
  optimizer_update_reference(all.view(), scalars, 0, count);
  for (const OptimizerTarget& target : all_targets()) {
    for (int i = 0; i < 30; ++i) {
      ReducedTile tile = start;
      for (std::size_t begin = 0; begin < count;) {
        const std::size_t end = std::min(count, begin + unit * (1 + generator() % (400 / unit)));
        const std::size_t first = generator() % (begin + 1) / unit * unit;
        target.update(tile.view(first), scalars, begin - first, end - first);
        begin = end;
      }
      expect_same(tile, all, std::string(target.name));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ReducedMomentsOf, ARangeTouchesNothingElse) {
  auto generator = seeded_generator();
  const std::size_t count = 320;
  const ReducedTile start = random(count, generator);
  const OptimizerScalars scalars = optimizer_scalars(configurations().front(), 2, 1.0);
  for (const OptimizerTarget& target : all_targets()) {
    ReducedTile tile = start, again = start;
    target.update(tile.view(), scalars, 64, 192);
    const std::size_t bytes = tile.exp_avg.size() / count, wide = tile.weights.weight.size() / count;
    for (const auto& [now, was, each] : {std::tuple(&tile.exp_avg, &start.exp_avg, bytes),
                                         std::tuple(&tile.weights.weight, &start.weights.weight, wide)}) {
      EXPECT_TRUE(std::equal(now->begin(), now->begin() + 64 * each, was->begin())) << target.name;
      EXPECT_TRUE(std::equal(now->begin() + 192 * each, now->end(), was->begin() + 192 * each)) << target.name;
    }
    target.update(again.view(), scalars, 64, 64);
    expect_same(again, start, "an empty range");
  }
}

TEST_P(ReducedMomentsOf, WhatIsNotFiniteOrNotStorableIsReportedFromEveryLane) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // The moment becomes the gradient itself.
  const OptimizerScalars scalars = optimizer_scalars({.kind = kind(), .beta1 = 0, .beta2 = 0}, 1, 1);
  for (const OptimizerTarget& target : all_targets()) {
    for (const float bad : {inf, -inf, nan}) {
      for (std::size_t lane = 0; lane < 37; ++lane) {
        ReducedTile tile(type(), kind(), format(), 37);
        for (std::size_t i = 0; i < 37; ++i) tile.weights.set(i, 1, 0, 0, 0.5f);
        EXPECT_TRUE(target.update(tile.view(), scalars, 0, 37)) << target.name;
        tile.weights.set_gradient(lane, bad);
        EXPECT_FALSE(target.update(tile.view(), scalars, 0, 37)) << target.name << ' ' << lane;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReducedMomentsOf,
                         ::testing::Combine(::testing::ValuesIn(kReducedKinds), ::testing::ValuesIn(kDTypes),
                                            ::testing::ValuesIn(kReducedFormats)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::string(name_of(std::get<1>(info.param))) + "_" +
                                  std::string(name_of(std::get<2>(info.param)));
                         });

// Scalars under which moments become the gradient and its square.
OptimizerScalars taking_gradients(OptimizerKind kind = OptimizerKind::kLion) {
  return optimizer_scalars({.kind = kind, .learning_rate = 0, .beta1 = 0, .beta2 = 0}, 1, 1);
}

// The last number that a form holds, and the next one.
TEST(ReducedMoments, AMomentThatItsFormDoesNotHoldIsReported) {
  for (const MomentFormat format : kReducedFormats) {
    const float last = std::bit_cast<float>(largest_moment(format));
    for (const OptimizerTarget& target : all_targets()) {
      for (const std::size_t lane : {0u, 9u, 40u}) {
        ReducedTile tile(DType::kFloat32, OptimizerKind::kLion, format, 41);
        tile.weights.set_gradient(lane, -last);
        EXPECT_TRUE(target.update(tile.view(), taking_gradients(), 0, 41)) << target.name;
        EXPECT_EQ(tile.exp_avg_at(lane), -last) << target.name;
        tile.weights.set_gradient(lane, std::nextafter(last, std::numeric_limits<float>::infinity()));
        EXPECT_FALSE(target.update(tile.view(), taking_gradients(), 0, 41)) << target.name;
      }
    }
  }
}

// How far a moment is from what was encoded, at most: half a code's width where exp_avg is, a whole one of sqrt(v).
TEST(Int8Moments, WhatIsDecodedIsNearWhatWasEncoded) {
  auto generator = seeded_generator();
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (int round = 0; round < 2'000; ++round) {
    // From the smallest subnormal bf16 to the largest scale; a subnormal m has few bits of its own.
    const int exponent = static_cast<int>(generator() % 245) - 120;
    const float scale = bf16_to_float(scale_to_bf16(std::ldexp(1 + std::abs(uniform(generator)), exponent)));
    const float x = uniform(generator) * scale;
    const double z = std::abs(x / scale), width = scale * (1 + z) * (1 + z) / 2 / 127;
    const std::int8_t code = exp_avg_to_int8(x, scale);
    EXPECT_NEAR(exp_avg_from_int8(code, scale), x, 0.51 * width + 1e-44) << x << " of " << scale;
    EXPECT_EQ(exp_avg_to_int8(-x, scale), -code);
    EXPECT_EQ(exp_avg_to_int8(exp_avg_from_int8(code, scale), scale), code) << "encoding again changes nothing";
    if (exponent > 62 || exponent < -70) continue;  // no square root of a float is there
    const float root = std::abs(x), wide = codes_a_root(scale), back = roots_a_code(scale);
    const auto random = static_cast<std::uint32_t>(generator() & 0xffff);
    const std::uint8_t square = root_to_uint8(root, wide, random);
    EXPECT_NEAR(static_cast<float>(square) * back, root, 1.001 * scale / 255) << root << " of " << scale;
    const float down = static_cast<float>(root_to_uint8(root, wide, 0)) * back;
    const float up = static_cast<float>(root_to_uint8(root, wide, 0xffff)) * back;
    EXPECT_LE(up - down, 1.001f * scale / 255);
  }
}

TEST(Int8Moments, TheEndsOfAGroupAreExactAndZeroStaysZero) {
  for (const float scale : {0x1p-133f, 1e-30f, 0.5f, 3.0f, 0x1p126f}) {
    EXPECT_EQ(exp_avg_to_int8(scale, scale), 127);
    EXPECT_EQ(exp_avg_to_int8(-scale, scale), -127);
    EXPECT_EQ(exp_avg_from_int8(-127, scale), -scale);
    EXPECT_EQ(exp_avg_to_int8(0, scale), 0);
    EXPECT_EQ(exp_avg_from_int8(0, scale), 0);
  }
  EXPECT_EQ(exp_avg_to_int8(0, 0), 0);
  EXPECT_EQ(exp_avg_from_int8(0, 0), 0);
  for (const std::uint32_t random : {0u, 0xffffu}) {
    EXPECT_EQ(root_to_uint8(0, codes_a_root(0), random), 0);
    EXPECT_EQ(root_to_uint8(0, codes_a_root(1), random), 0);
    EXPECT_EQ(root_to_uint8(1, codes_a_root(1), random), 255);
  }
  EXPECT_EQ(exp_avg_sq_from_uint8(255, roots_a_code(2)), 4);
  EXPECT_EQ(exp_avg_sq_from_uint8(0, roots_a_code(2)), 0);
}

TEST(Int8Moments, AScaleIsTheLargestRoundedUp) {
  for (const float largest : {0.0f, 1.0f, std::nextafter(1.0f, 2.0f), 1.1f, 0x1p-149f, 3.7e-23f, 1.6e38f}) {
    const float scale = bf16_to_float(scale_to_bf16(largest));
    EXPECT_GE(scale, largest);
    EXPECT_LE(scale - largest, largest / 128 + 0x1p-133f);
  }
  EXPECT_EQ(bf16_to_float(scale_to_bf16(1.0f)), 1.0f);
}

// A group with one large gradient: a square root far below a code's width must not become 0.
TEST(Int8Moments, ExpAvgSqIsZeroOnlyWhereItWasZero) {
  for (const OptimizerTarget& target : all_targets()) {
    ReducedTile tile(DType::kFloat32, OptimizerKind::kAdam, MomentFormat::kInt8, 64);
    for (std::size_t i = 0; i < 64; ++i) tile.weights.set(i, 1, 0, 0, i % 3 == 0 ? 0.0f : 1e-9f);
    tile.weights.set_gradient(5, 1e6f);
    ASSERT_TRUE(target.update(tile.view(), taking_gradients(OptimizerKind::kAdam), 0, 64));
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(tile.exp_avg_sq_at(i) > 0, i % 3 != 0) << target.name << ' ' << i;
      EXPECT_EQ(tile.exp_avg_sq[i] == std::byte{0}, i % 3 == 0) << target.name << ' ' << i;
    }
  }
}

TEST(Bf16Moments, RoundToOneOfTheTwoNeighboursAndAreRightInTheMean) {
  const float x = 1 + 0.3f / 128;  // three tenths of the way
  int up = 0;
  for (std::uint64_t index = 0; index < 20'000; ++index) {
    const std::uint32_t bits = rounding_bits(rounding_key(1, 2), index);
    const float got = bf16_to_float(moment_to_bf16(x, random_of_exp_avg(bits)));
    ASSERT_TRUE(got == 1 || got == 1 + 1.0f / 128) << got;
    up += got > x;
    EXPECT_EQ(bf16_to_float(moment_to_bf16(-1.5f, random_of_exp_avg_sq(bits))), -1.5f) << "what fits stays";
  }
  EXPECT_NEAR(up, 6'000, 5 * std::sqrt(20'000 * 0.3 * 0.7));  // five standard deviations
}

// Averages, neighbours and the two arrays must not go together, whatever part of the key changes.
TEST(RoundingBits, AreSpreadAndIndependentOfEveryPartOfTheirKey) {
  constexpr int kCount = 100'000;
  const auto unit = [](std::uint32_t random16) { return random16 / 65536.0 - 0.5; };
  const auto bits = [](std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
    return rounding_bits(rounding_key(seed, step), index);
  };
  double mean = 0, square = 0, arrays = 0, neighbours = 0, steps = 0, seeds = 0, far = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint32_t all = bits(3, 10, i);
    const double x = unit(random_of_exp_avg(all));
    mean += x, square += x * x;
    arrays += x * unit(random_of_exp_avg_sq(all));
    neighbours += x * unit(random_of_exp_avg(bits(3, 10, i + 1)));
    steps += x * unit(random_of_exp_avg(bits(3, 11, i)));
    seeds += x * unit(random_of_exp_avg(bits(4, 10, i)));
    far += x * unit(random_of_exp_avg(bits(3, 10, i + (std::uint64_t{1} << 32))));
  }
  const double deviation = 1 / std::sqrt(12.0), root = std::sqrt(double{kCount});
  EXPECT_NEAR(mean / root, 0, 5 * deviation);
  EXPECT_NEAR(square / kCount, 1 / 12.0, 0.002);
  for (const double product : {arrays, neighbours, steps, seeds, far})
    EXPECT_NEAR(product / root, 0, 5 * deviation * deviation);
}

// Gradients become ten times smaller: sqrt(v) must go down with them at beta2 = 0.999, where a step moves it by less
// than any code's width. Rounded to nearest it would stay at 2.7 times the exact one.
TEST(ReducedMoments, ExpAvgSqFollowsGradientsThatBecomeSmall) {
  auto generator = seeded_generator();
  std::normal_distribution<float> normal;
  const std::size_t count = 1'024;
  for (const MomentFormat format : kReducedFormats) {
    ReducedTile tile(DType::kFloat32, OptimizerKind::kAdam, format, count);
    OwnedTile exact(DType::kFloat32, OptimizerKind::kAdam, count);
    const OptimizerConfig config{.learning_rate = 1e-5, .beta2 = 0.999, .seed = 1};
    for (std::uint64_t step = 1; step <= 4'000; ++step) {
      for (std::size_t i = 0; i < count; i += 1 + generator() % 2) {
        const float g = normal(generator) * (step <= 2'000 ? 1e-3f : 1e-4f);
        tile.weights.set_gradient(i, g), exact.set_gradient(i, g);
      }
      const OptimizerScalars scalars = optimizer_scalars(config, step, 1);
      ASSERT_TRUE(optimizer_update(tile.view(), scalars, 0, count));
      ASSERT_TRUE(optimizer_update(exact.view(), scalars, 0, count));
    }
    std::vector<double> ratios;
    for (std::size_t i = 0; i < count; ++i) ratios.push_back(std::sqrt(tile.exp_avg_sq_at(i) / exact.exp_avg_sq[i]));
    std::ranges::nth_element(ratios, ratios.begin() + count / 2);
    EXPECT_NEAR(ratios[count / 2], 1, 0.1) << name_of(format);
  }
}

TEST(ReducedMomentsDeathTest, RefusesWhatItCannotUpdate) {
  const OptimizerScalars lion = taking_gradients(), adam = taking_gradients(OptimizerKind::kAdam);
  ReducedTile tile(DType::kFloat32, OptimizerKind::kLion, MomentFormat::kInt8, 100);
  EXPECT_DEATH(optimizer_update(tile.view(), lion, 8, 64), "elements that share a scale are updated together");
  EXPECT_DEATH(optimizer_update(tile.view(), lion, 0, 40), "elements that share a scale are updated together");
  EXPECT_DEATH(optimizer_update(tile.view(), adam, 0, 100), "the moments that its optimizer keeps");
  OptimizerTile without = tile.view();
  without.reduced.exp_avg_scales = nullptr;
  EXPECT_DEATH(optimizer_update(without, lion, 0, 100), "int8 moments, and no other, have scales");
  OptimizerScalars sgd = lion;
  sgd.kind = OptimizerKind::kSgd;
  EXPECT_DEATH(optimizer_update(tile.view(), sgd, 0, 100), "the moments of Adam and Lion alone are reduced");
}

}  // namespace
}  // namespace spillway
