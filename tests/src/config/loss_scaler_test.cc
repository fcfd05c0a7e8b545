// The loss scale of fp16 training against what DeepSpeed's DynamicLossScaler.update_scale() does. The sequences below
// were worked out by hand from its published text (deepspeed/runtime/fp16/loss_scaler.py, 0.19.8), in its words:
//
//   overflow: delayed_shift == 1 or cur_hysteresis == 1: an error when cur_scale == min_scale, else
//             cur_scale = max(cur_scale / 2, min_scale); otherwise cur_hysteresis -= 1. last_overflow_iter = cur_iter
//   else:     consecutive_hysteresis: cur_hysteresis = delayed_shift. stable = cur_iter - last_overflow_iter - 1, where
//             last_overflow_iter is -1 at first; stable > 0 and stable % scale_window == 0: cur_hysteresis =
//             delayed_shift and cur_scale *= 2
//   always:   cur_iter += 1
#include "src/config/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "spillway/error.h"

namespace spillway {
namespace {

Config fp16_with(const LossScaleConfig& scale) {
  Config config;
  config.weights = DType::kFloat16;
  config.loss_scale = scale;
  return config;
}

struct Sequence {
  const char* what;
  LossScaleConfig config;
  // Steps in order, `o` with an overflow, `.` without, `E` with one that is an error; the scale after each.
  std::string_view steps;
  std::vector<double> scales;
};

const Sequence kSequences[] = {
    {"the first doubling comes after one step more than the window has: stable is 0, 1, 2, 3, 4, 5",
     {.initial_power = 4, .window = 2, .hysteresis = 1},
     "......",
     {16, 16, 32, 32, 64, 64}},
    {"and so does the first one after an overflow",
     {.initial_power = 4, .window = 2, .hysteresis = 1},
     "o...o..",
     {8, 8, 8, 16, 8, 8, 8}},
    {"hysteresis 1: every overflow halves",
     {.initial_power = 4, .window = 1000, .hysteresis = 1},
     "oo.o",
     {8, 4, 4, 2}},
    {"hysteresis 2: the first overflow only uses it up, and nothing but a doubling makes it whole",
     {.initial_power = 4, .window = 1000, .hysteresis = 2},
     "o.o.oo",
     {16, 16, 8, 8, 4, 2}},
    {"hysteresis 3", {.initial_power = 4, .window = 1000, .hysteresis = 3}, "oooo", {16, 16, 8, 4}},
    {"a doubling makes the hysteresis whole",
     {.initial_power = 4, .window = 1, .hysteresis = 2},
     "o...oo",
     // stable is 0, 1, 2 in the steps without: doubled in the second and third, whole before the next overflow.
     {16, 16, 32, 64, 64, 32}},
    {"consecutive hysteresis: every step without an overflow makes it whole",
     {.initial_power = 4, .window = 1000, .hysteresis = 2, .consecutive_hysteresis = true},
     "o.o.ooo",
     {16, 16, 16, 16, 16, 8, 4}},
    {"down to the minimum, where an overflow is an error; what comes after it goes on",
     {.initial_power = 1, .window = 1000, .hysteresis = 1, .least = 1},
     "oEE.E",
     {1, 1, 1, 1, 1}},
    {"at the minimum an overflow that hysteresis is left for is none yet",
     {.initial_power = 0, .window = 1000, .hysteresis = 2, .least = 1},
     "o.E",
     {1, 1, 1}},
    {"a minimum between two powers is reached itself",
     {.initial_power = 3, .window = 1, .hysteresis = 1, .least = 3},
     "ooE..o",
     {4, 3, 3, 3, 6, 3}},
    {"a static scale skips and stays", {.fixed = 384}, "o..ooo.", {384, 384, 384, 384, 384, 384, 384}},
};

TEST(LossScaler, GoesAsDeepSpeedsDoes) {
  for (const Sequence& sequence : kSequences) {
    SCOPED_TRACE(sequence.what);
    LossScaler scaler(fp16_with(sequence.config));
    std::uint64_t skipped = 0;
    ASSERT_EQ(sequence.steps.size(), sequence.scales.size());
    for (std::size_t i = 0; i < sequence.steps.size(); ++i) {
      SCOPED_TRACE(i);
      const char step = sequence.steps[i];
      if (step != '.') {
        EXPECT_EQ(scaler.may_skip(), step == 'o');
      }
      if (step != 'E') scaler.update(step == 'o');
      skipped += step == 'o';
      EXPECT_EQ(scaler.scale(), sequence.scales[i]);
      EXPECT_EQ(scaler.skipped(), skipped);
      EXPECT_EQ(scaler.skipped_last(), step == 'o' || (step == 'E' && sequence.steps[i - 1] != '.'));
    }
  }
}

TEST(LossScaler, TheDefaultsAreDeepSpeeds) {
  LossScaler scaler(fp16_with({}));
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(scaler.reported(), 65536);
  for (int step = 0; step < 1000; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 65536) << "stable was 999 in the last";
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 131072);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 131072) << "hysteresis 2";
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 65536);
  for (int power = 15; power >= 0; --power) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_FALSE(scaler.may_skip());
}

TEST(LossScaler, OutsideOfFp16NothingIsScaledOrSkipped) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    Config config = fp16_with({.fixed = 128});
    config.weights = type;
    LossScaler scaler(config);
    EXPECT_EQ(scaler.scale(), 1);
    EXPECT_EQ(scaler.reported(), std::nullopt);
    EXPECT_FALSE(scaler.may_skip());
    for (int step = 0; step < 3000; ++step) scaler.update(false);
    EXPECT_EQ(scaler.scale(), 1);
    std::vector<std::byte> record, blob;
    const std::byte own[] = {std::byte{7}, std::byte{8}};
    EXPECT_THAT(scaler.record(own, record), ::testing::ElementsAreArray(own));
    scaler.resume(record, 9, blob);
    EXPECT_THAT(blob, ::testing::ElementsAreArray(own));
  }
}

// From any step of a sequence on, another scaler goes on with what the record says.
TEST(LossScaler, GoesOnFromItsRecord) {
  const LossScaleConfig config{.initial_power = 10, .window = 2, .hysteresis = 3};
  constexpr std::string_view kSteps = "o..oo...o.ooo....o";
  const std::byte own[] = {std::byte{7}, std::byte{8}, std::byte{9}};
  for (std::size_t stop = 0; stop <= kSteps.size(); ++stop) {
    LossScaler whole(fp16_with(config)), first(fp16_with(config)), second(fp16_with(config));
    for (std::size_t i = 0; i < stop; ++i) first.update(kSteps[i] == 'o');
    std::vector<std::byte> record, blob;
    EXPECT_EQ(first.record(own, record).size(), LossScalerState::kBytes + 3);
    second.resume(record, stop, blob);
    EXPECT_THAT(blob, ::testing::ElementsAreArray(own));
    for (std::size_t i = 0; i < kSteps.size(); ++i) {
      whole.update(kSteps[i] == 'o');
      if (i >= stop) second.update(kSteps[i] == 'o');
    }
    EXPECT_EQ(second.scale(), whole.scale()) << stop;
    EXPECT_EQ(second.skipped(), whole.skipped()) << stop;
    std::vector<std::byte> one, other;
    whole.record(own, one);
    second.record(own, other);
    EXPECT_EQ(one, other) << stop;
  }
}

TEST(LossScaler, AConfigurationThatChangesIsHeld) {
  LossScaler before(fp16_with({.initial_power = 4, .hysteresis = 5}));
  before.update(true);
  std::vector<std::byte> record, blob;
  before.record({}, record);
  LossScaler fixed(fp16_with({.fixed = 128})), higher(fp16_with({.initial_power = 6, .hysteresis = 1, .least = 64}));
  fixed.resume(record, 1, blob);
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_EQ(fixed.skipped(), 1u);
  higher.resume(record, 1, blob);
  EXPECT_EQ(higher.scale(), 64) << "no less than the minimum";
  EXPECT_FALSE(higher.may_skip()) << "no more hysteresis than is configured";
}

TEST(LossScaler, ARecordThatItDidNotWriteIsRefused) {
  LossScaler writer(fp16_with({}));
  for (const bool overflow : {true, false, true}) writer.update(overflow);
  std::vector<std::byte> record, blob;
  writer.record({}, record);
  const auto refused = [&](const std::vector<std::byte>& bytes, std::uint64_t step) {
    LossScaler reader(fp16_with({}));
    try {
      reader.resume(bytes, step, blob);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt);
      EXPECT_EQ(reader.scale(), 65536);
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused(record, 3));
  EXPECT_TRUE(refused(record, 1)) << "two steps were skipped";
  EXPECT_TRUE(refused({}, 3));
  EXPECT_TRUE(refused({record.begin(), record.end() - 1}, 3));
  EXPECT_TRUE(refused(std::vector<std::byte>(LossScalerState::kBytes), 3));
  for (const double scale : {0.0, -1.0, double{INFINITY}, std::nan("")}) {
    LossScalerState{.scale = scale}.encode(std::span(record).first<LossScalerState::kBytes>());
    EXPECT_TRUE(refused(record, 3)) << scale;
  }
  LossScalerState{.hysteresis = 0}.encode(std::span(record).first<LossScalerState::kBytes>());
  EXPECT_TRUE(refused(record, 3));
}

TEST(LossScaler, ValuesThatNoScaleFollowsFromAreRefusedByKey) {
  const auto refused = [](const LossScaleConfig& config) {
    try {
      LossScaler{fp16_with(config)};
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      return error.parts().object;
    }
    return std::string("taken");
  };
  EXPECT_EQ(refused({}), "taken");
  EXPECT_EQ(refused({.fixed = -1}), "fp16.loss_scale");
  EXPECT_EQ(refused({.fixed = INFINITY}), "fp16.loss_scale");
  EXPECT_EQ(refused({.least = 0}), "fp16.min_loss_scale");
  EXPECT_EQ(refused({.least = std::nan("")}), "fp16.min_loss_scale");
  EXPECT_EQ(refused({.window = 0}), "fp16.loss_scale_window");
  EXPECT_EQ(refused({.hysteresis = 0}), "fp16.hysteresis");
  EXPECT_EQ(refused({.initial_power = 65}), "fp16.initial_scale_power");
  EXPECT_EQ(refused({.initial_power = 2, .least = 8}), "fp16.initial_scale_power");
  EXPECT_EQ(refused({.fixed = 1, .window = 0, .hysteresis = 0}), "taken") << "a static scale does not read them";
}

}  // namespace
}  // namespace spillway
