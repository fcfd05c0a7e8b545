#include "kernels/adam.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/float_environment.h"
#include "spillway/bf16.h"
#include "tests/kernels/random.h"

namespace spillway {
namespace {

// A tile with memory of its own; copies share nothing.
struct OwnedTile {
  DType type;
  std::vector<float> weight32, gradient32, exp_avg, exp_avg_sq;
  std::vector<std::uint16_t> weight16, gradient16;
  std::vector<std::int16_t> residual;

  explicit OwnedTile(DType t, std::size_t count) : type(t), exp_avg(count), exp_avg_sq(count) {
    if (t == DType::kFloat32) {
      weight32.resize(count), gradient32.resize(count);
    } else {
      weight16.resize(count), gradient16.resize(count), residual.resize(count);
    }
  }
  void set(std::size_t i, float w, float m, float v, float g) {
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (type == DType::kFloat32) {
      weight32[i] = w, gradient32[i] = g;
    } else {
      weight16[i] = split_master(w).weight, residual[i] = split_master(w).residual, gradient16[i] = float_to_bf16(g);
    }
  }
  float weight(std::size_t i) const {
    return type == DType::kFloat32 ? weight32[i] : join_master({weight16[i], residual[i]});
  }
  float gradient(std::size_t i) const {
    return type == DType::kFloat32 ? gradient32[i] : bf16_to_float(gradient16[i]);
  }
  // The tile from element `first` on, to vary alignment.
  AdamTile view(std::size_t first = 0) {
    const bool is32 = type == DType::kFloat32;
    return {.type = type,
            .weight = is32 ? static_cast<void*>(weight32.data() + first) : weight16.data() + first,
            .residual = is32 ? nullptr : residual.data() + first,
            .exp_avg = exp_avg.data() + first,
            .exp_avg_sq = exp_avg_sq.data() + first,
            .gradient = is32 ? static_cast<const void*>(gradient32.data() + first) : gradient16.data() + first,
            .count = exp_avg.size() - first};
  }
};

OwnedTile random_tile(DType type, std::size_t count, std::mt19937_64& generator) {
  OddFloats odd(generator);
  OwnedTile tile(type, count);
  for (std::size_t i = 0; i < count; ++i) tile.set(i, odd(), odd(), std::abs(odd()), odd());
  return tile;
}

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// Equal bits, or both NaN: which NaN is the processor's choice.
void expect_same(const OwnedTile& got, const OwnedTile& want, const std::string& where) {
  const auto same = [](float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); };
  for (std::size_t i = 0; i < want.exp_avg.size(); ++i) {
    ASSERT_TRUE(same(got.weight(i), want.weight(i)))
        << where << " weight " << i << ": " << got.weight(i) << " instead of " << want.weight(i);
    ASSERT_TRUE(same(got.exp_avg[i], want.exp_avg[i])) << where << " exp_avg " << i;
    ASSERT_TRUE(same(got.exp_avg_sq[i], want.exp_avg_sq[i])) << where << " exp_avg_sq " << i;
    if (!std::isnan(want.weight(i)) && want.type == DType::kBFloat16) {
      ASSERT_EQ(got.weight16[i], want.weight16[i]) << where << " " << i;
    }
  }
}

std::vector<AdamHyper> hypers() {
  std::vector<AdamHyper> all;
  for (bool decoupled : {true, false})
    for (bool correction : {true, false})
      for (double decay : {0.0, 0.1})
        all.push_back({.learning_rate = 3e-4, .beta2 = 0.95, .weight_decay = decay, .decoupled_decay = decoupled,
                       .bias_correction = correction});
  return all;
}

void compare_targets(std::mt19937_64& generator) {
  const std::size_t count = 20'011;
  for (DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const AdamHyper& hyper : hypers()) {
      OwnedTile expected = random_tile(type, count, generator);
      const OwnedTile start = expected;
      const AdamScalars scalars = adam_scalars(hyper, 1 + generator() % 100, 0.37);
      const bool finite = adam_update_reference(expected.view(), scalars, 0, count);
      ASSERT_TRUE(finite) << "the input is chosen so that nothing overflows";
      for (const AdamTarget& target : adam_targets()) {
        OwnedTile tile = start;
        EXPECT_EQ(target.update(tile.view(), scalars, 0, count), finite) << target.name;
        expect_same(tile, expected, std::string(target.name) + " " + std::string(name_of(type)));
      }
      OwnedTile tile = start;
      EXPECT_EQ(adam_update(tile.view(), scalars, 0, count), finite);
      expect_same(tile, expected, "dispatched");
    }
  }
}

TEST(Adam, AllTargetsGiveTheBitsOfTheReference) {
  auto generator = seeded_generator();
  compare_targets(generator);
}

#if defined(__x86_64__)
TEST(Adam, FlushToZeroOfTheHostProgramChangesNoBits) {
  auto generator = seeded_generator();
  const std::size_t count = 4'099;
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.1}, 3, 0.5);
  OwnedTile expected = random_tile(DType::kFloat32, count, generator);
  const OwnedTile start = expected;
  adam_update_reference(expected.view(), scalars, 0, count);
  auto targets = adam_targets();
  targets.push_back({"dispatched", adam_update});
  for (const AdamTarget& target : targets) {
    OwnedTile tile = start;
    const unsigned saved = _mm_getcsr();
    const unsigned flushing = saved | 0x8040u | 0x6000u;  // FTZ, DAZ, round towards zero
    _mm_setcsr(flushing);
    target.update(tile.view(), scalars, 0, count);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after & ~0x3fu, flushing & ~0x3fu) << "the caller's settings must come back";
    expect_same(tile, expected, std::string(target.name));
  }
}
#endif

TEST(Adam, AnyOffsetAndLengthGiveTheSameBitsAndTouchNothingElse) {
  auto generator = seeded_generator();
  const std::size_t count = 120;
  for (DType type : {DType::kFloat32, DType::kBFloat16}) {
    const OwnedTile start = random_tile(type, count, generator);
    const AdamScalars scalars = adam_scalars({.weight_decay = 0.01}, 7, 1.0);
    OwnedTile all = start;
    adam_update_reference(all.view(), scalars, 0, count);
    for (const AdamTarget& target : adam_targets()) {
      for (std::size_t first = 0; first <= 17; ++first) {
        for (std::size_t length = 0; length <= 70; ++length) {
          OwnedTile tile = start, expected = start;
          // Half of the offset through the pointers, half through `begin`.
          const std::size_t begin = first / 2;
          target.update(tile.view(first - begin), scalars, begin, begin + length);
          for (std::size_t i = first; i < first + length; ++i) {
            expected.exp_avg[i] = all.exp_avg[i], expected.exp_avg_sq[i] = all.exp_avg_sq[i];
            if (type == DType::kFloat32) {
              expected.weight32[i] = all.weight32[i];
            } else {
              expected.weight16[i] = all.weight16[i], expected.residual[i] = all.residual[i];
            }
          }
          expect_same(tile, expected, std::string(target.name) + " at " + std::to_string(first));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Adam, OverflowOfASquaredGradientIsReportedFromEveryLane) {
  for (DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const AdamTarget& target : adam_targets()) {
      for (std::size_t bad = 0; bad < 37; ++bad) {
        OwnedTile tile(type, 37);
        for (std::size_t i = 0; i < 37; ++i) tile.set(i, 1, 0, 0, i == bad ? 3e22f : 1e-3f);
        EXPECT_FALSE(target.update(tile.view(), adam_scalars({}, 1, 1), 0, 37)) << target.name << " " << bad;
        EXPECT_TRUE(std::isinf(tile.exp_avg_sq[bad]));
        EXPECT_TRUE(std::isfinite(tile.weight(bad ? bad - 1 : 1)));
      }
    }
  }
}

TEST(Adam, ANonFiniteWeightOrMomentIsReported) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const AdamTarget& target : adam_targets()) {
    for (float bad : {inf, -inf, nan}) {
      for (int where = 0; where < 3; ++where) {
        OwnedTile tile(DType::kFloat32, 33);
        for (std::size_t i = 0; i < 33; ++i) tile.set(i, 1, 0, 1, 1);
        tile.set(20, where == 0 ? bad : 1, where == 1 ? bad : 0, where == 2 ? bad : 1, 1);
        EXPECT_FALSE(target.update(tile.view(), adam_scalars({}, 1, 1), 0, 33)) << target.name << where;
        EXPECT_TRUE(target.update(tile.view(), adam_scalars({}, 1, 1), 0, 20)) << target.name << where;
      }
    }
  }
}

TEST(Adam, LanesBesideTheTailNeverReport) {
  // Constants of any kind in the unused lanes would overflow or divide by zero with these scalars.
  AdamScalars scalars = adam_scalars({.epsilon = 0}, 1, 1e30);
  for (const AdamTarget& target : adam_targets()) {
    OwnedTile tile(DType::kFloat32, 3);
    for (std::size_t i = 0; i < 3; ++i) tile.set(i, 1, 1e-3f, 1e-6f, 1e-30f);
    EXPECT_TRUE(target.update(tile.view(), scalars, 0, 3)) << target.name;
  }
}

// A double-precision Adam, written from the papers. Over 1,000 steps the reference may differ by
//   1,000 roundings of the weight: |w| * 1000 * 2^-24, and
//   1,000 updates of at most 3 lr, whose relative error is that of beta2 in fp32 against its distance from 1, halved by the
//   root (2^-25 / 0.001 / 2 = 1.5e-5), plus a few roundings: below 5e-5 together.
TEST(AdamReference, FollowsADoublePrecisionAdamFor1000Steps) {
  auto generator = seeded_generator();
  std::normal_distribution<double> normal;
  const std::size_t count = 256;
  for (bool decoupled : {true, false}) {
    for (DType type : {DType::kFloat32, DType::kBFloat16}) {
      const AdamHyper hyper{.learning_rate = 2e-3, .weight_decay = 0.05, .decoupled_decay = decoupled};
      OwnedTile tile(type, count);
      std::vector<double> w(count), m(count), v(count), moved(count), largest(count);
      for (std::size_t i = 0; i < count; ++i) {
        tile.set(i, static_cast<float>(normal(generator)), 0, 0, 0);
        w[i] = tile.weight(i);
      }
      for (std::uint64_t step = 1; step <= 1000; ++step) {
        for (std::size_t i = 0; i < count; ++i) {
          tile.set(i, tile.weight(i), tile.exp_avg[i], tile.exp_avg_sq[i],
                   static_cast<float>(normal(generator) + std::sin(static_cast<double>(i))));
          double g = tile.gradient(i) * 0.25;
          if (!decoupled) g += hyper.weight_decay * w[i];
          m[i] = hyper.beta1 * m[i] + (1 - hyper.beta1) * g;
          v[i] = hyper.beta2 * v[i] + (1 - hyper.beta2) * g * g;
          const double m_hat = m[i] / (1 - std::pow(hyper.beta1, static_cast<double>(step)));
          const double v_hat = v[i] / (1 - std::pow(hyper.beta2, static_cast<double>(step)));
          const double before = w[i];
          if (decoupled) w[i] -= hyper.learning_rate * hyper.weight_decay * w[i];
          w[i] -= hyper.learning_rate * m_hat / (std::sqrt(v_hat) + hyper.epsilon);
          moved[i] += std::abs(w[i] - before);
          largest[i] = std::max(largest[i], std::abs(w[i]));
        }
        ASSERT_TRUE(adam_update_reference(tile.view(), adam_scalars(hyper, step, 0.25), 0, count));
      }
      for (std::size_t i = 0; i < count; ++i) {
        const double bound = largest[i] * 1000 * 0x1p-24 + 1000 * 3 * hyper.learning_rate * 5e-5;
        EXPECT_NEAR(tile.weight(i), w[i], bound);
        EXPECT_GT(moved[i], 100 * bound) << "the weights must have moved for the comparison to mean anything";
      }
    }
  }
}

TEST(AdamScalars, AreRoundedOnceFromDouble) {
  const AdamScalars s = adam_scalars({.learning_rate = 1e-3, .weight_decay = 0.1}, 3, 0.5);
  EXPECT_EQ(s.gradient_scale, 0.5f);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1 - 0.9));
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.999));  // not 1 - 0.999f, which differs
  EXPECT_NE(s.one_minus_beta2, 1 - 0.999f);
  EXPECT_FLOAT_EQ(s.step_size, static_cast<float>(1e-3 / (1 - 0.9 * 0.9 * 0.9)));
  EXPECT_FLOAT_EQ(s.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(1 - 0.999 * 0.999 * 0.999)));
  EXPECT_EQ(s.negative_lr_decay, static_cast<float>(-1e-3 * 0.1));
  EXPECT_TRUE(s.decoupled && !s.l2);
}

TEST(AdamScalars, BiasesFadeOutAndCanBeSwitchedOff) {
  const AdamScalars late = adam_scalars({.learning_rate = 1e-3}, 10'000'000, 1);
  EXPECT_EQ(late.step_size, 1e-3f);
  EXPECT_EQ(late.inv_sqrt_bias2, 1.0f);
  const AdamScalars off = adam_scalars({.learning_rate = 1e-3, .bias_correction = false}, 1, 1);
  EXPECT_EQ(off.step_size, 1e-3f);
  EXPECT_EQ(off.inv_sqrt_bias2, 1.0f);
}

TEST(Adam, WithoutDecayAWeightOfMinusZeroStaysMinusZero) {
  for (bool decoupled : {true, false}) {
    OwnedTile tile(DType::kFloat32, 1);
    tile.set(0, -0.0f, 0, 1, 0);
    ASSERT_TRUE(adam_update(tile.view(), adam_scalars({.decoupled_decay = decoupled}, 1, 1), 0, 1));
    EXPECT_EQ(bits(tile.weight(0)), bits(-0.0f));
  }
}

TEST(AdamDeathTest, RefusesWhatItCannotUpdate) {
  OwnedTile tile(DType::kFloat32, 4);
  AdamTile half = tile.view();
  half.type = DType::kFloat16;
  EXPECT_DEATH(adam_update(half, adam_scalars({}, 1, 1), 0, 4), "Adam updates fp32 and bf16 weights");
  EXPECT_DEATH(adam_update(tile.view(), adam_scalars({}, 1, 1), 0, 5), "the range must lie in the tile");
  AdamTile without = OwnedTile(DType::kBFloat16, 4).view();
  without.residual = nullptr;
  EXPECT_DEATH(adam_update(without, adam_scalars({}, 1, 1), 0, 0), "has residuals");
}

}  // namespace
}  // namespace spillway
