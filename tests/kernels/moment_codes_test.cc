#include "kernels/moment_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/optimizer.h"
#include "tests/kernels/host_float_settings.h"
#include "tests/kernels/reduced_tile.h"

namespace spillway {
namespace {

constexpr Moment kBoth[] = {Moment::kExpAvg, Moment::kExpAvgSq};

bool has(Moment moment, OptimizerKind kind) { return moment == Moment::kExpAvg || has_exp_avg_sq(kind); }

std::vector<float> decoded(ReducedTile& tile, Moment moment) {
  std::vector<float> values(tile.weights.count);
  decode_moments(tile.view().reduced, moment, 0, values);
  return values;
}

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(want[i])) << i << " " << want[i];
}

// A tile as so many updates leave it, with gradients of all magnitudes and groups that get none any more.
ReducedTile trained(OptimizerKind kind, MomentFormat format, std::size_t count, std::mt19937_64& generator) {
  ReducedTile tile(DType::kFloat32, kind, format, count);
  tile.index = generator() % 1'000'000 * kMomentGroup;
  const OptimizerConfig config{.kind = kind, .learning_rate = 1e-3, .beta2 = 0.95, .seed = 5};
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (std::uint64_t step = 1; step <= 40; ++step) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t group = i / kMomentGroup;
      const float magnitude = std::ldexp(1.0f, static_cast<int>(group % 90) - 60);
      tile.weights.set_gradient(i, step > group % 50 + 1 ? 0 : uniform(generator) * magnitude);
    }
    EXPECT_TRUE(optimizer_update_reference(tile.view(), optimizer_scalars(config, step, 1), 0, count));
  }
  return tile;
}

TEST(MomentCodes, AreDecodedAsTheUpdateDecodesThem) {
  auto generator = seeded_generator();
  for (const MomentFormat format : kReducedFormats) {
    ReducedTile tile = random_reduced(DType::kFloat32, OptimizerKind::kAdam, format, 5000, generator);
    const std::vector<float> m = decoded(tile, Moment::kExpAvg), v = decoded(tile, Moment::kExpAvgSq);
    for (std::size_t i = 0; i < m.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(m[i]), std::bit_cast<std::uint32_t>(tile.exp_avg_at(i)));
      ASSERT_EQ(std::bit_cast<std::uint32_t>(v[i]), std::bit_cast<std::uint32_t>(tile.exp_avg_sq_at(i)));
    }
  }
}

// So that a snapshot, which holds fp32, restores the very moments.
TEST(MomentCodes, ValuesThatWereCodesBecomeCodesOfTheSameValues) {
  auto generator = seeded_generator();
  for (const OptimizerKind kind : kReducedKinds) {
    for (const MomentFormat format : kReducedFormats) {
      SCOPED_TRACE(std::string(name_of(kind)) + " " + std::string(name_of(format)));
      const std::size_t count = 20'011;  // the last group is shorter
      ReducedTile tile = trained(kind, format, count, generator);
      ReducedTile again(DType::kFloat32, kind, format, count);
      for (const Moment moment : kBoth) {
        if (!has(moment, kind)) continue;
        const std::vector<float> values = decoded(tile, moment);
        encode_moments(again.view().reduced, moment, 0, values, generator());
        expect_same_bits(decoded(again, moment), values);
      }
    }
  }
}

// Gradient 0 and beta 1 leave a moment as it is, so an update rounds the very values.
TEST(MomentCodes, OtherValuesAreRoundedAsAnUpdateRoundsThem) {
  auto generator = seeded_generator();
  std::normal_distribution<float> normal;
  const std::size_t count = 10'016;
  const std::uint64_t key = rounding_key(7, 9);
  for (const MomentFormat format : kReducedFormats) {
    ReducedTile tile(DType::kFloat32, OptimizerKind::kAdam, format, count);
    tile.index = 96'000;
    const ReducedMoments to = tile.view().reduced;
    for (const Moment moment : kBoth) {
      std::vector<float> values(count);
      for (float& value : values) value = moment == Moment::kExpAvg ? normal(generator) : std::abs(normal(generator));
      encode_moments(to, moment, 0, values, key);
      const std::vector<float> got = decoded(tile, moment);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t random = rounding_bits(key, tile.index + i);
        if (format == MomentFormat::kBFloat16) {
          const std::uint32_t sixteen =
              moment == Moment::kExpAvg ? random_of_exp_avg(random) : random_of_exp_avg_sq(random);
          ASSERT_EQ(got[i], bf16_to_float(moment_to_bf16(values[i], sixteen)));
          continue;
        }
        const auto group = std::span(values).subspan(i / kMomentGroup * kMomentGroup, kMomentGroup);
        const float largest =
            std::abs(*std::ranges::max_element(group, {}, [](float value) { return std::abs(value); }));
        if (moment == Moment::kExpAvg) {
          const float scale = bf16_to_float(scale_to_bf16(largest));
          ASSERT_EQ(got[i], exp_avg_from_int8(exp_avg_to_int8(values[i], scale), scale));
        } else {
          const float scale = bf16_to_float(scale_to_bf16(std::sqrt(largest)));
          const std::uint8_t code =
              root_to_uint8(std::sqrt(values[i]), codes_a_root(scale), random_of_exp_avg_sq(random));
          ASSERT_EQ(got[i], exp_avg_sq_from_uint8(code, roots_a_code(scale)));
        }
      }
    }
  }
}

TEST(MomentCodes, ZerosAreZerosAndPiecesAreAsTheWhole) {
  auto generator = seeded_generator();
  for (const MomentFormat format : kReducedFormats) {
    ReducedTile whole = random_reduced(DType::kFloat32, OptimizerKind::kAdam, format, 4096, generator), parts = whole;
    std::vector<float> values(4096);
    for (float& value : values) value = static_cast<float>(generator() % 1000);
    std::fill(values.begin() + 1024, values.begin() + 2048, 0.0f);
    for (const Moment moment : kBoth) {
      encode_moments(whole.view().reduced, moment, 0, values, 3);
      for (std::size_t at = 0; at < values.size(); at += 1024)
        encode_moments(parts.view().reduced, moment, at, std::span(values).subspan(at, 1024), 3);
      expect_same_bits(decoded(parts, moment), decoded(whole, moment));
      for (std::size_t i = 1024; i < 2048; ++i) ASSERT_EQ(decoded(whole, moment)[i], 0.0f);
    }
  }
}

TEST(MomentCodes, FlushToZeroOfTheHostProgramChangesNoBits) {
  auto generator = seeded_generator();
  ReducedTile tile = trained(OptimizerKind::kAdam, MomentFormat::kInt8, 4096, generator), again = tile;
  const std::vector<float> values = decoded(tile, Moment::kExpAvg);
  const FloatSettings saved = float_settings();
  set_float_settings(saved | kHostFloatSettings);
  const std::vector<float> widened = decoded(tile, Moment::kExpAvg);
  encode_moments(again.view().reduced, Moment::kExpAvg, 0, values, 1);
  set_float_settings(saved);
  expect_same_bits(widened, values);
  expect_same_bits(decoded(again, Moment::kExpAvg), values);
}

TEST(MomentCodes, WhatNoFormHoldsIsFound) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto found = [](float value, Moment moment, MomentFormat format) {
    const float values[] = {0, 1, value, 2};
    return find_unstorable(values, moment, format) == std::size_t{2};
  };
  for (const MomentFormat format : kMomentFormats) {
    for (const Moment moment : kBoth) {
      EXPECT_TRUE(found(kInfinity, moment, format) && found(-kInfinity, moment, format) && found(NAN, moment, format));
      EXPECT_FALSE(found(1e38f, moment, format));
    }
    EXPECT_FALSE(found(-1, Moment::kExpAvg, format));
    EXPECT_TRUE(found(-1, Moment::kExpAvgSq, format));
  }
  EXPECT_TRUE(found(2e38f, Moment::kExpAvg, MomentFormat::kInt8));
  EXPECT_FALSE(found(2e38f, Moment::kExpAvg, MomentFormat::kBFloat16));
  EXPECT_TRUE(found(3.4e38f, Moment::kExpAvg, MomentFormat::kBFloat16));
}

}  // namespace
}  // namespace spillway
