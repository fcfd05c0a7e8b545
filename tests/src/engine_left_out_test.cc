// A parameter that gets no gradient in a step is left out of its update, wherever it lives and whenever its block is
// updated: it is then as in a run that never made these steps. (parameter_updates_test.cc: by which scalars.)
//
// The engine's question whether a store keeps update counts is answered here (`--wrap`, meson.build).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <vector>

#include "spillway/error.h"
#include "spillway/store.h"
#include "tests/src/layout_cases.h"

namespace {

bool without_counts = false;  // stores are as older versions have made them

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
bool __real__ZNK8spillway9TileStore19keeps_update_countsEv(const void* store);
bool __wrap__ZNK8spillway9TileStore19keeps_update_countsEv(const void* store) {
  return !without_counts && __real__ZNK8spillway9TileStore19keeps_update_countsEv(store);
}
// NOLINTEND
}

namespace spillway {
namespace {

using testing::Brings;
using ::testing::HasSubstr;
using testing::LayoutCase;
using testing::LayoutRun;
using testing::ToyPush;
using Outcome = LayoutRun::Outcome;

constexpr std::uint64_t kSteps = 8;  // from the third on, blocks are updated on a guess

// Some parameters are left out of some steps, a whole block of one, and in others a part of the pushes brings nothing.
bool left_out(std::uint64_t step, std::uint32_t block, std::uint32_t parameter) {
  if (block == 3 && step == 4) return true;
  if (block == 0 && parameter == 0) return step == 2;
  if (block == 1) return parameter == step % 3;
  return block == 2 && parameter == 1 && (step == 1 || step == 6);
}
Brings unevenly(const ToyPush& push) {
  if (left_out(push.step, push.block, push.parameter)) return Brings::kNothing;
  return push.block == 4 && push.part / 2 == push.step % 2 ? Brings::kNothing : Brings::kGradient;
}
Brings with_zeros(const ToyPush& push) {
  const Brings brings = unevenly(push);
  return brings == Brings::kNothing ? Brings::kZeros : brings;
}

struct Training : LayoutRun {
  explicit Training(const LayoutCase& layout, DType type = DType::kBFloat16,
                    const std::function<void(Config&)>& change = {}, bool with_store = false)
      : LayoutRun(layout, type, change, with_store) {
    trainer->brings = unevenly;
  }
  void resume() {
    open(OnExisting::kResume);
    trainer->brings = unevenly;
  }
};

class LeftOut : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(, LeftOut, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

void expect_equal(const Outcome& got, const Outcome& wanted) {
  EXPECT_TRUE(got.bits == wanted.bits);
  ASSERT_EQ(got.reports.size(), wanted.reports.size());
  for (std::size_t i = 0; i < got.reports.size(); ++i) {
    EXPECT_EQ(got.reports[i].gradient_norm, wanted.reports[i].gradient_norm) << i;
    EXPECT_EQ(got.reports[i].skipped, wanted.reports[i].skipped) << i;
  }
}

TEST_P(LeftOut, TheSameBitsWhereverATensorLives) {
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {  // of which some steps are skipped
    std::map<std::uint64_t, Outcome> wanted;                      // by kind
    for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
      SCOPED_TRACE(layout.name);
      const auto [of, is_new] = wanted.try_emplace(layout.kind());
      if (is_new) {
        of->second = Training(testing::in_hbm_like(layout), type, clip).until(kSteps);
        EXPECT_EQ(std::ranges::any_of(of->second.reports, &StepReport::skipped), type == DType::kFloat16);
        Training other(testing::in_hbm_like(layout), type, clip);
        other.trainer->brings = with_zeros;
        const Outcome zeros = other.until(kSteps);
        EXPECT_FALSE(of->second.bits == zeros.bits) << "zeros are a gradient";
        EXPECT_EQ(of->second.reports[0].gradient_norm, zeros.reports[0].gradient_norm);
      }
      expect_equal(Training(layout, type, clip).until(kSteps), of->second);
    }
  }
}

TEST_P(LeftOut, AResumedRunKnowsWhatEachParameterHasHad) {
  std::map<std::uint64_t, Outcome> wanted;  // by kind
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    const auto [of, is_new] = wanted.try_emplace(layout.kind());
    if (is_new) of->second = Training(testing::in_hbm_like(layout), DType::kBFloat16, clip).until(kSteps);
    Training run(layout, DType::kBFloat16, clip, true);
    for (const std::uint64_t step : {1u, 3u, 6u}) {
      run.until(step);
      run.engine->flush();
      run.resume();
      ASSERT_EQ(run.engine->current_step(), step);
    }
    EXPECT_TRUE(run.until(kSteps).bits == of->second.bits);
    run.engine->flush();
    testing::end_and_expect_store_at(run, kSteps);
  }
}

TEST_P(LeftOut, AStepThatIsNotMadeCountsForNothing) {
  std::map<std::uint64_t, Outcome> wanted;  // by kind
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    const auto [of, is_new] = wanted.try_emplace(layout.kind());
    if (is_new) of->second = Training(testing::in_hbm_like(layout), DType::kBFloat16, clip).until(kSteps);
    Training run(layout, DType::kBFloat16, clip);
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      // Given up before its last visit, with other parameters than those of the step left out; and refused.
      run.trainer->brings = [](const ToyPush& push) {
        return push.parameter == 0 ? Brings::kGradient : Brings::kNothing;
      };
      run.trainer->between = [left = 10]() mutable {
        if (left-- == 0) throw std::runtime_error("given up");
      };
      EXPECT_THROW(run.trainer->run_step(), std::runtime_error);
      run.trainer->between = [] {};
      run.engine->discard_step();
      run.trainer->poison_step = step;
      EXPECT_THROW(run.trainer->run_step(), Error);
      run.trainer->poison_step = 0;
      run.trainer->brings = unevenly;
      run.trainer->run_step();
    }
    EXPECT_TRUE(testing::exported(*run.engine) == of->second.bits);
  }
}

// The bits of a parameter in what exported() gives.
std::vector<std::uint32_t> of_parameter(LayoutRun& run, std::uint32_t block, std::uint32_t parameter) {
  std::vector<std::uint32_t> bits;
  run.engine->export_weights(true, [&](std::uint32_t b, std::uint32_t p, std::uint64_t, std::span<const float> values) {
    if (b != block || p != parameter) return;
    const std::size_t at = bits.size();
    bits.resize(at + values.size());
    std::memcpy(bits.data() + at, values.data(), values.size_bytes());
  });
  return bits;
}

// A toy's gradients follow from the parameter's own weights and the data. Without clipping, one that is left out of
// three steps of eight is as in a run of the five others: weights, moments, decay and bias correction.
class LeftOutOf : public ::testing::TestWithParam<OptimizerKind> {};

INSTANTIATE_TEST_SUITE_P(, LeftOutOf, ::testing::ValuesIn(kOptimizerKinds),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(LeftOutOf, AParameterIsAsInARunWithoutTheseSteps) {
  const auto change = [](Config& config) {
    config.gradient_clipping = 0;
    config.optimizer.kind = GetParam();
    config.optimizer.momentum = 0.9;
    config.optimizer.dampening = 0.5;  // of which its first step knows nothing
    config.parameter_groups = {{.parameters = {"h.2.*"}, .learning_rate = 5e-3, .weight_decay = {}}};
  };
  const auto idle = [](std::uint64_t step) { return step == 1 || step == 3 || step == 6; };
  for (const char* name : {"hbm", "host", "nvme", "nvme, large tiles", "nvme, gradients spilled"}) {
    SCOPED_TRACE(name);
    const LayoutCase layout = testing::layout_case(name);
    LayoutRun whole(layout, DType::kBFloat16, change), without(layout, DType::kBFloat16, change),
        uneven(layout, DType::kBFloat16, change);
    whole.until(kSteps);
    without.trainer->data_of = [](std::uint64_t step) { return step < 2 ? step + 1 : step < 4 ? step + 2 : step + 3; };
    without.until(kSteps - 3);
    uneven.trainer->brings = [&](const ToyPush& push) {
      const bool one = (push.block == 2 && push.parameter == 0) || push.block == 3;
      return one && idle(push.step) ? Brings::kNothing : Brings::kGradient;
    };
    uneven.until(kSteps);
    for (std::uint32_t b = 0; b < whole.model.blocks.size(); ++b) {
      for (std::uint32_t p = 0; p < 2; ++p) {
        const bool one = (b == 2 && p == 0) || b == 3;
        EXPECT_TRUE(of_parameter(uneven, b, p) == of_parameter(one ? without : whole, b, p)) << b << ", " << p;
      }
    }
  }
}

TEST(EngineLeftOut, AStepWithoutAnyGradientChangesNoWeight) {
  for (const char* name : {"hbm", "host", "nvme"}) {
    Training run(testing::layout_case(name));
    run.trainer->brings = [](const ToyPush& push) { return push.step == 1 ? Brings::kNothing : Brings::kGradient; };
    const auto before = testing::exported(*run.engine);
    const StepReport report = run.trainer->run_step();
    EXPECT_EQ(report.step, 1u);
    EXPECT_EQ(report.gradient_norm, 0);
    EXPECT_TRUE(testing::exported(*run.engine) == before) << name;
    run.trainer->run_step();
    EXPECT_FALSE(testing::exported(*run.engine) == before) << name;
  }
}

// Of several micro-batches' gradients those that there are are added, as if the others had been zeros.
TEST(EngineLeftOut, TheSumIsOfTheMicroBatchesThatBringOne) {
  for (const char* name : {"hbm", "host", "nvme", "nvme, sums in host"}) {
    LayoutRun partly(testing::layout_case(name), DType::kFloat32), zeros(testing::layout_case(name), DType::kFloat32);
    const auto first_alone = [](Brings else_) {
      return [else_](const ToyPush& push) { return push.part / 2 == push.step % 2 ? Brings::kGradient : else_; };
    };
    partly.trainer->brings = first_alone(Brings::kNothing);
    zeros.trainer->brings = first_alone(Brings::kZeros);
    expect_equal(partly.until(3), zeros.until(3));
  }
}

// In a step whose guess is wrong, the early updates and whom they left out are taken back.
TEST(EngineLeftOut, AWrongGuessIsTakenBack) {
  const auto run = [](const LayoutCase& layout) {
    Training training(layout, DType::kBFloat16, [](Config& config) { config.gradient_clipping = 100; });
    training.trainer->gain = [](std::uint64_t step) { return step == 4 || step == 8 ? 1e3f : 1.f; };
    return training.until(kSteps);
  };
  const Outcome outcome = run(testing::layout_case("nvme, guessing"));
  EXPECT_TRUE(outcome.reports[3].taken_back);
  EXPECT_TRUE(outcome.reports[7].taken_back);
  EXPECT_GT(outcome.reports[2].speculative_blocks, 0u);
  expect_equal(outcome, run(testing::kInHbm));
}

// The run goes on, with zeros for a gradient.
TEST(EngineLeftOut, AStoreThatCannotKeepTheCountsRefusesAndNothingIsChanged) {
  const auto expect_refused = [](Training& run) {
    run.trainer->brings = unevenly;
    try {
      run.trainer->run_step();
      ADD_FAILURE() << "a step was made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      EXPECT_THAT(error.what(), HasSubstr("got no gradient in this step, and the store, which an older version"));
      EXPECT_THAT(error.what(), HasSubstr("; save a snapshot and begin a new store with it, or push zeros"));
    }
    run.engine->discard_step();
  };
  for (const char* name : {"nvme", "weights in hbm, states on nvme"}) {
    for (const double clipping : {0.0, 1.0}) {
      const auto change = [=](Config& config) { config.gradient_clipping = clipping; };
      LayoutRun zeros(testing::layout_case(name), DType::kBFloat16, change);
      zeros.trainer->brings = with_zeros;
      const Outcome wanted = zeros.until(kSteps);
      Training run(testing::layout_case(name), DType::kBFloat16, change);
      without_counts = true;
      for (std::uint64_t step = 1; step <= kSteps; ++step) {
        if (step % 3 < 2) expect_refused(run);  // block 1 has a parameter that is left out
        ASSERT_EQ(run.engine->current_step(), step - 1);
        run.trainer->brings = with_zeros;
        run.trainer->run_step();
      }
      without_counts = false;
      EXPECT_TRUE(testing::exported(*run.engine) == wanted.bits) << name << ", clipping " << clipping;
    }
  }
}

TEST(EngineLeftOut, AStoreThatIsRolledBackHasTheCountsOfTheStepBefore) {
  const LayoutCase nvme = testing::layout_case("nvme");
  const Outcome wanted = Training(testing::kInHbm).until(kSteps);
  Training run(nvme);
  run.until(6);
  run.engine.reset();
  ASSERT_EQ(roll_back_store({run.store.path()}), 5u);
  run.resume();
  ASSERT_EQ(run.engine->current_step(), 5u);
  EXPECT_TRUE(run.until(kSteps).bits == wanted.bits);
}

}  // namespace
}  // namespace spillway
