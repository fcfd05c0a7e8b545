#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/kernels/host_float_settings.h"
#include "tests/kernels/optimizer_tile.h"

namespace spillway {
namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// Equal bits, or both NaN: which NaN is the processor's choice.
void expect_same(const OwnedTile& got, const OwnedTile& want, const std::string& where) {
  const auto same = [](float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); };
  for (std::size_t i = 0; i < want.count; ++i) {
    ASSERT_TRUE(same(got.weight_at(i), want.weight_at(i)))
        << where << " weight " << i << ": " << got.weight_at(i) << " instead of " << want.weight_at(i);
    if (!std::isnan(want.weight_at(i))) {
      ASSERT_TRUE(same(got.rounded_at(i), want.rounded_at(i))) << where << " rounded weight " << i;
    }
    if (!want.exp_avg.empty()) {
      ASSERT_TRUE(same(got.exp_avg[i], want.exp_avg[i])) << where << " exp_avg " << i;
    }
    if (!want.exp_avg_sq.empty()) {
      ASSERT_TRUE(same(got.exp_avg_sq[i], want.exp_avg_sq[i])) << where << " exp_avg_sq " << i;
    }
  }
}

// Every way through the kernel that a configuration can ask for.
std::vector<OptimizerConfig> configurations(OptimizerKind kind) {
  std::vector<OptimizerConfig> all;
  for (const double decay : {0.0, 0.1}) {
    OptimizerConfig config{.kind = kind, .learning_rate = 3e-4, .beta2 = 0.95, .weight_decay = decay};
    all.push_back(config);
    if (kind == OptimizerKind::kAdam) {
      config.decoupled_decay = false;
      all.push_back(config);
      config.bias_correction = false;
      all.push_back(config);
    }
    if (kind == OptimizerKind::kSgd) {
      config.momentum = 0.9, config.dampening = 0.25;
      all.push_back(config);
      config.dampening = 0, config.nesterov = true;
      all.push_back(config);
    }
  }
  return all;
}

class Optimizers : public ::testing::TestWithParam<std::tuple<OptimizerKind, DType>> {
 protected:
  OptimizerKind kind() const { return std::get<0>(GetParam()); }
  DType type() const { return std::get<1>(GetParam()); }
};

TEST_P(Optimizers, AllTargetsGiveTheBitsOfTheReference) {
  std::string names;
  for (const OptimizerTarget& target : optimizer_targets()) names += std::string(target.name) + ' ';
  RecordProperty("targets", names);  // tools/check_aarch64.sh shows which ones ran
  auto generator = seeded_generator();
  const std::size_t count = 20'011;
  for (const OptimizerConfig& config : configurations(kind())) {
    OwnedTile expected = random_tile(type(), kind(), count, generator);
    const OwnedTile start = expected;
    const OptimizerScalars scalars = optimizer_scalars(config, 1 + generator() % 100, 0.37);
    const bool finite = optimizer_update_reference(expected.view(), scalars, 0, count);
    if (type() != DType::kFloat16) {
      ASSERT_TRUE(finite) << "the input is chosen so that nothing overflows";
    }
    auto targets = optimizer_targets();
    targets.push_back({"dispatched", optimizer_update});
    for (const OptimizerTarget& target : targets) {
      OwnedTile tile = start;
      EXPECT_EQ(target.update(tile.view(), scalars, 0, count), finite) << target.name;
      expect_same(tile, expected, std::string(target.name));
      EXPECT_EQ(tile.gradient, start.gradient) << "a gradient is read only";
    }
  }
}

TEST_P(Optimizers, FlushToZeroOfTheHostProgramChangesNoBits) {
  auto generator = seeded_generator();
  const std::size_t count = 4'099;
  const OptimizerScalars scalars = optimizer_scalars(configurations(kind()).back(), 3, 0.5);
  OwnedTile expected = random_tile(type(), kind(), count, generator);
  const OwnedTile start = expected;
  optimizer_update_reference(expected.view(), scalars, 0, count);
  auto targets = optimizer_targets();
  targets.push_back({"dispatched", optimizer_update});
  for (const OptimizerTarget& target : targets) {
    OwnedTile tile = start;
    const FloatSettings saved = float_settings(), flushing = saved | kHostFloatSettings;
    set_float_settings(flushing);
    target.update(tile.view(), scalars, 0, count);
    const FloatSettings after = float_settings();
    set_float_settings(saved);
    EXPECT_EQ(after & kHostFloatSettings, kHostFloatSettings) << "the caller's settings must come back";
    expect_same(tile, expected, std::string(target.name));
  }
}

TEST_P(Optimizers, AnyOffsetAndLengthGiveTheSameBitsAndTouchNothingElse) {
  auto generator = seeded_generator();
  const std::size_t count = 120;
  const OwnedTile start = random_tile(type(), kind(), count, generator);
  const OptimizerScalars scalars = optimizer_scalars(configurations(kind()).back(), 7, 1.0);
  OwnedTile all = start;
  optimizer_update_reference(all.view(), scalars, 0, count);
  for (const OptimizerTarget& target : optimizer_targets()) {
    for (std::size_t first = 0; first <= 17; ++first) {
      for (std::size_t length = 0; length <= 70; ++length) {
        OwnedTile tile = start, expected = start;
        // Half of the offset through the pointers, half through `begin`.
        const std::size_t begin = first / 2;
        target.update(tile.view(first - begin), scalars, begin, begin + length);
        for (std::size_t i = first; i < first + length; ++i) expected.take(all, i);
        expect_same(tile, expected, std::string(target.name) + " at " + std::to_string(first));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The last pieces of a tile are prefetched past its end, at the end of mapped memory too; and lengths around the groups
// in which the loop runs.
TEST_P(Optimizers, LongRangesOfAnyLengthGiveTheSameBits) {
  auto generator = seeded_generator();
  const std::size_t count = 5'000;
  const OwnedTile start = random_tile(type(), kind(), count, generator);
  const OptimizerScalars scalars = optimizer_scalars(configurations(kind()).front(), 2, 1.0);
  OwnedTile all = start;
  optimizer_update_reference(all.view(), scalars, 0, count);
  for (const OptimizerTarget& target : optimizer_targets()) {
    for (int i = 0; i < 60; ++i) {
      const std::size_t begin = generator() % count, end = begin + generator() % (count - begin + 1);
      OwnedTile tile = start, expected = start;
      target.update(tile.view(), scalars, begin, end);
      for (std::size_t k = begin; k < end; ++k) expected.take(all, k);
      expect_same(tile, expected, std::string(target.name) + " from " + std::to_string(begin));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Optimizers, AWeightOrMomentThatIsNotFiniteIsReportedFromEveryLane) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const OptimizerScalars scalars = optimizer_scalars({.kind = kind()}, 1, 1);
  auto targets = optimizer_targets();
  for (const OptimizerTarget& target : targets) {
    for (const float bad : {inf, -inf, nan}) {
      for (const int where : {0, 1, 2}) {
        if ((where == 1 && !has_exp_avg(kind())) || (where == 2 && !has_exp_avg_sq(kind()))) continue;
        for (std::size_t lane = 0; lane < 37; ++lane) {
          OwnedTile tile(type(), kind(), 37);
          for (std::size_t i = 0; i < 37; ++i) tile.set(i, 1, 0, 1, 1);
          tile.set(lane, where == 0 ? bad : 1, where == 1 ? bad : 0, where == 2 ? bad : 1, 1);
          EXPECT_FALSE(target.update(tile.view(), scalars, 0, 37)) << target.name << where << ' ' << lane;
          EXPECT_TRUE(target.update(tile.view(), scalars, 0, lane)) << target.name << where << ' ' << lane;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Optimizers,
                         ::testing::Combine(::testing::ValuesIn(kOptimizerKinds), ::testing::ValuesIn(kDTypes)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::string(name_of(std::get<1>(info.param)));
                         });

TEST(Adam, OverflowOfASquaredGradientIsReportedFromEveryLane) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {  // an fp16 gradient's square cannot overflow
    for (const OptimizerTarget& target : optimizer_targets()) {
      for (std::size_t bad = 0; bad < 37; ++bad) {
        OwnedTile tile(type, OptimizerKind::kAdam, 37);
        for (std::size_t i = 0; i < 37; ++i) tile.set(i, 1, 0, 0, i == bad ? 3e22f : 1e-3f);
        EXPECT_FALSE(target.update(tile.view(), optimizer_scalars({}, 1, 1), 0, 37)) << target.name << " " << bad;
        EXPECT_TRUE(std::isinf(tile.exp_avg_sq[bad]));
        EXPECT_TRUE(std::isfinite(tile.weight_at(bad ? bad - 1 : 1)));
      }
    }
  }
}

// The master is finite, what forward and backward read is not.
TEST(Adam, AWeightThatRoundsToInfinityIsReported) {
  const OptimizerScalars still = optimizer_scalars({.learning_rate = 0}, 1, 1);
  for (const OptimizerTarget& target : optimizer_targets()) {
    for (const auto& [type, good, bad] :
         {std::tuple(DType::kFloat16, 65519.0f, 65520.0f), std::tuple(DType::kBFloat16, 3.38e38f, 3.4e38f)}) {
      OwnedTile tile(type, OptimizerKind::kAdam, 20);
      for (std::size_t i = 0; i < 20; ++i) tile.set(i, good, 0, 1, 1);
      EXPECT_TRUE(target.update(tile.view(), still, 0, 20)) << target.name;
      tile.set_weight(7, bad);
      EXPECT_FALSE(target.update(tile.view(), still, 0, 20)) << target.name;
    }
  }
}

TEST(Adam, LanesBesideTheTailNeverReport) {
  // Constants of any kind in the unused lanes would overflow or divide by zero with these scalars.
  OptimizerScalars scalars = optimizer_scalars({.epsilon = 0}, 1, 1e30);
  for (const OptimizerTarget& target : optimizer_targets()) {
    OwnedTile tile(DType::kFloat32, OptimizerKind::kAdam, 3);
    for (std::size_t i = 0; i < 3; ++i) tile.set(i, 1, 1e-3f, 1e-6f, 1e-30f);
    EXPECT_TRUE(target.update(tile.view(), scalars, 0, 3)) << target.name;
  }
}

TEST(Lion, MovesByTheSignAndNotAtAllWithoutOne) {
  const OptimizerScalars scalars = optimizer_scalars({.kind = OptimizerKind::kLion, .learning_rate = 0.5}, 1, 1);
  for (const OptimizerTarget& target : optimizer_targets()) {
    OwnedTile tile(DType::kFloat32, OptimizerKind::kLion, 4);
    tile.set(0, 1, 0, 0, 1e-30f), tile.set(1, 1, 0, 0, -7), tile.set(2, 1, 0, 0, 0);
    tile.set(3, 1, 0, 0, std::numeric_limits<float>::quiet_NaN());
    EXPECT_FALSE(target.update(tile.view(), scalars, 0, 4)) << "NaN has no sign to move by";
    EXPECT_EQ(tile.weight_at(0), 0.5f);
    EXPECT_EQ(tile.weight_at(1), 1.5f);
    EXPECT_EQ(tile.weight_at(2), 1.0f);
    EXPECT_TRUE(std::isnan(tile.weight_at(3)));
  }
}

TEST(OptimizerScalars, OfAdamAreRoundedOnceFromDouble) {
  const OptimizerScalars s = optimizer_scalars({.learning_rate = 1e-3, .weight_decay = 0.1}, 3, 0.5);
  EXPECT_EQ(s.gradient_scale, 0.5f);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1 - 0.9));
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1 - 0.999));  // not 1 - 0.999f, which differs
  EXPECT_NE(s.one_minus_beta2, 1 - 0.999f);
  EXPECT_FLOAT_EQ(s.step_size, static_cast<float>(1e-3 / (1 - 0.9 * 0.9 * 0.9)));
  EXPECT_FLOAT_EQ(s.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(1 - 0.999 * 0.999 * 0.999)));
  EXPECT_EQ(s.negative_lr_decay, static_cast<float>(-1e-3 * 0.1));
  EXPECT_TRUE(s.decoupled && !s.l2);
}

TEST(OptimizerScalars, BiasesFadeOutAndCanBeSwitchedOff) {
  const OptimizerScalars late = optimizer_scalars({.learning_rate = 1e-3}, 10'000'000, 1);
  EXPECT_EQ(late.step_size, 1e-3f);
  EXPECT_EQ(late.inv_sqrt_bias2, 1.0f);
  const OptimizerScalars off = optimizer_scalars({.learning_rate = 1e-3, .bias_correction = false}, 1, 1);
  EXPECT_EQ(off.step_size, 1e-3f);
  EXPECT_EQ(off.inv_sqrt_bias2, 1.0f);
}

TEST(OptimizerScalars, DecayIsL2OrDecoupledByTheOptimizer) {
  for (const OptimizerKind kind : kOptimizerKinds) {
    const bool decoupled = kind == OptimizerKind::kAdam || kind == OptimizerKind::kLion;
    const OptimizerScalars s = optimizer_scalars({.kind = kind, .weight_decay = 0.1}, 1, 1);
    EXPECT_EQ(s.decoupled, decoupled) << name_of(kind);
    EXPECT_EQ(s.l2, !decoupled) << name_of(kind);
    EXPECT_EQ(s.step_size, static_cast<float>(kind == OptimizerKind::kAdam ? 1e-3 / (1 - 0.9) : 1e-3));
  }
}

TEST(OptimizerScalars, TheFirstStepOfSgdTakesItsGradientWhole) {
  const OptimizerConfig config{.kind = OptimizerKind::kSgd, .momentum = 0.9, .dampening = 0.25};
  EXPECT_EQ(optimizer_scalars(config, 1, 1).one_minus_beta1, 1.0f);
  EXPECT_EQ(optimizer_scalars(config, 2, 1).one_minus_beta1, 0.75f);
  EXPECT_EQ(optimizer_scalars({.kind = OptimizerKind::kSgd, .dampening = 0.25}, 2, 1).one_minus_beta1, 1.0f);
}

TEST(Adam, WithoutDecayAWeightOfMinusZeroStaysMinusZero) {
  for (const bool decoupled : {true, false}) {
    OwnedTile tile(DType::kFloat32, OptimizerKind::kAdam, 1);
    tile.set(0, -0.0f, 0, 1, 0);
    ASSERT_TRUE(optimizer_update(tile.view(), optimizer_scalars({.decoupled_decay = decoupled}, 1, 1), 0, 1));
    EXPECT_EQ(bits(tile.weight_at(0)), bits(-0.0f));
  }
}

TEST(OptimizerDeathTest, RefusesWhatItCannotUpdate) {
  OwnedTile tile(DType::kFloat32, OptimizerKind::kAdam, 4);
  const OptimizerScalars adam = optimizer_scalars({}, 1, 1);
  OptimizerTile half = tile.view();
  half.type = DType::kFloat16;
  EXPECT_DEATH(optimizer_update(half, adam, 0, 4), "has an fp32 master");
  EXPECT_DEATH(optimizer_update(tile.view(), adam, 0, 5), "the range must lie in the tile");
  OptimizerTile without = OwnedTile(DType::kBFloat16, OptimizerKind::kAdam, 4).view();
  without.residual = nullptr;
  EXPECT_DEATH(optimizer_update(without, adam, 0, 0), "has residuals");
  const OptimizerScalars lion = optimizer_scalars({.kind = OptimizerKind::kLion}, 1, 1);
  EXPECT_DEATH(optimizer_update(tile.view(), lion, 0, 4), "the moments that its optimizer keeps");
}

}  // namespace
}  // namespace spillway
