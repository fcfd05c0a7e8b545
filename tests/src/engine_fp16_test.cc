// Training in fp16: a step whose gradients overflow leaves no trace but a lower loss scale, wherever tensors live and
// whenever blocks are updated, and neither a new process nor a snapshot forgets the scale.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "src/plan/plan.h"
#include "tests/src/layout_cases.h"
#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using Outcome = testing::LayoutRun::Outcome;
using testing::TempStore;

constexpr int kSteps = 8;

struct Training : testing::LayoutRun {
  explicit Training(const LayoutCase& layout, const std::function<void(Config&)>& change = {}, bool with_store = false)
      : LayoutRun(layout, DType::kFloat16, change, with_store) {}
};

void expect_equal(const Outcome& got, const Outcome& wanted) {
  EXPECT_TRUE(got.bits == wanted.bits);
  ASSERT_EQ(got.reports.size(), wanted.reports.size());
  for (std::size_t i = 0; i < got.reports.size(); ++i) {
    const StepReport &one = got.reports[i], &other = wanted.reports[i];
    EXPECT_EQ(one.step, other.step);
    EXPECT_EQ(one.skipped, other.skipped) << one.step;
    EXPECT_EQ(one.loss_scale, other.loss_scale) << one.step;
    EXPECT_EQ(one.gradient_norm, other.gradient_norm) << one.step;
    EXPECT_EQ(one.learning_rate, other.learning_rate) << one.step;
  }
}

// Some steps are skipped and some are not, and the scale goes up as well as down.
void expect_varied(const Outcome& outcome) {
  std::size_t skipped = 0, falls = 0, rises = 0;
  for (std::size_t i = 0; i < outcome.reports.size(); ++i) {
    const StepReport& report = outcome.reports[i];
    skipped += report.skipped;
    EXPECT_EQ(std::isinf(report.gradient_norm), report.skipped);
    ASSERT_TRUE(report.loss_scale.has_value());
    if (i == 0) continue;
    falls += *report.loss_scale < *outcome.reports[i - 1].loss_scale;
    rises += *report.loss_scale > *outcome.reports[i - 1].loss_scale;
  }
  EXPECT_GT(skipped, 1u);
  EXPECT_LT(skipped, outcome.reports.size() - 2);
  EXPECT_GT(falls, 0u);
  EXPECT_GT(rises, 0u);
}

// What the layouts are for: every mode of a step is one of them.
TEST(LayoutCases, MakeAStepInEveryWay) {
  std::set<std::string> modes;
  for (const LayoutCase& layout : testing::layout_cases()) {
    for (const double clipping : {0.0, 0.5}) {
      Config config = layout.config(DType::kFloat16, "/drive");
      config.gradient_clipping = clipping;
      layout.choose_budgets(config, layout.model());
      const Plan plan = make_plan(config, layout.model());
      const auto any = [&](auto of) { return std::ranges::any_of(plan.blocks, of); };
      if (plan.gradients_in_hbm) modes.insert("updated on the device");
      if (any(&BlockPlan::early)) modes.insert("inside backward");
      if (any(&BlockPlan::speculative) && layout.speculative_blocks > 0) modes.insert("on a guess");
      if (any([](const BlockPlan& block) { return block.gradient_home == Placement::kHost; }))
        modes.insert("in the next forward");
      if (any([](const BlockPlan& block) { return block.gradient_home == Placement::kNvme; }))
        modes.insert("gradients on nvme");
      if (plan.hbm.places.empty() && !plan.gradients_in_hbm) modes.insert("weights in hbm");
      const auto cached = [](const TilePlace& tile) { return tile.home[1] == Placement::kHost; };
      if (layout.states == Placement::kNvme && std::ranges::any_of(plan.tile_places, cached) &&
          !std::ranges::all_of(plan.tile_places, cached))
        modes.insert("some tiles cached");
    }
  }
  EXPECT_THAT(modes, ::testing::UnorderedElementsAre("updated on the device", "inside backward", "on a guess",
                                                     "in the next forward", "gradients on nvme", "weights in hbm",
                                                     "some tiles cached"));
}

class Fp16 : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(, Fp16, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return std::string(info.param == 0 ? "WithoutClipping" : info.param < 1 ? "Clipped" : "BelowTheLimit");
});

TEST_P(Fp16, TheSameBitsAndScalesWhereverATensorLives) {
  std::map<std::uint64_t, Outcome> wanted;  // by kind
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    const auto [of, is_new] = wanted.try_emplace(layout.kind());
    if (is_new) expect_varied(of->second = Training(testing::in_hbm_like(layout), clip).until(kSteps));
    expect_equal(Training(layout, clip).until(kSteps), of->second);
  }
}

// With a static scale, a run whose third and sixth gradients overflow is the run without them: weights and states, the
// optimizer's count of steps (bias correction) and the schedule's.
TEST_P(Fp16, ASkippedStepLeavesNoTrace) {
  const auto change = [](Config& config) {
    clip(config);
    config.loss_scale = {.fixed = 1024};
    config.schedule = {.kind = ScheduleKind::kWarmup, .warmup_max_lr = 1e-2, .warmup_steps = 5};
  };
  const auto without_them = [&](const LayoutCase& layout) {
    Training clean(testing::in_hbm_like(layout), change);
    clean.trainer->data_of = [](std::uint64_t step) { return step < 3 ? step : step < 5 ? step + 1 : step + 2; };
    const Outcome outcome = clean.until(kSteps - 2);
    for (const StepReport& report : outcome.reports) EXPECT_FALSE(report.skipped);
    EXPECT_LT(outcome.reports[0].learning_rate, outcome.reports[4].learning_rate);
    return outcome;
  };
  std::map<std::uint64_t, Outcome> of_kind;
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    if (!of_kind.contains(layout.kind())) of_kind[layout.kind()] = without_them(layout);
    const Outcome& wanted = of_kind[layout.kind()];
    Training run(layout, change);
    run.trainer->gain = [](std::uint64_t step) { return step == 3 || step == 6 ? 1e5f : 1.f; };
    Outcome got = run.until(kSteps);
    for (const std::size_t at : {5, 2}) {
      const StepReport& report = got.reports[at];
      EXPECT_TRUE(report.skipped);
      EXPECT_EQ(report.loss_scale, 1024);
      EXPECT_EQ(report.learning_rate, got.reports[at + 1].learning_rate) << "the next step has the rate of this one";
      got.reports.erase(got.reports.begin() + static_cast<std::ptrdiff_t>(at));
    }
    EXPECT_TRUE(got.bits == wanted.bits);
    for (std::size_t i = 0; i < got.reports.size(); ++i) {
      EXPECT_EQ(got.reports[i].gradient_norm, wanted.reports[i].gradient_norm) << i;
      EXPECT_EQ(got.reports[i].learning_rate, wanted.reports[i].learning_rate) << i;
    }
  }
}

// What is updated inside backward on the guess that clipping has no effect is taken back by an overflow as well.
TEST(EngineFp16, AGuessIsTakenBackByAnOverflow) {
  const auto layout = testing::layout_case("nvme, guessing");
  const auto change = [](Config& config) {
    config.gradient_clipping = 100;
    config.loss_scale = {.fixed = 1024};
  };
  Training run(layout, change);
  run.trainer->gain = [](std::uint64_t step) { return step == 4 ? 1e5f : 1.f; };
  const Outcome got = run.until(kSteps);
  for (const StepReport& report : got.reports) {
    const bool guesses = report.step == 3 || report.step == 4 || report.step >= 7;  // two steps before were calm
    EXPECT_EQ(report.speculative_blocks > 0, guesses) << report.step;
    EXPECT_EQ(report.taken_back, report.step == 4) << report.step;
    EXPECT_EQ(report.skipped, report.step == 4) << report.step;
  }
}

// A power of two in the scale changes no bit as long as nothing is too small or too large for fp16, in no tier.
TEST(EngineFp16, TheScaleIsDividedOutExactly) {
  std::map<double, Outcome> wanted;  // by clipping
  for (const double scale : {1.0, 16.0, 512.0}) {
    for (const LayoutCase& layout : {testing::kInHbm, testing::layout_case("nvme")}) {
      for (const double clipping : {0.0, 5.0}) {
        SCOPED_TRACE(layout.name + " with scale " + std::to_string(scale));
        Training run(layout, [&](Config& config) {
          config.loss_scale = {.fixed = scale};
          config.gradient_clipping = clipping;
          config.optimizer.kind = OptimizerKind::kSgd;  // to which a factor in all gradients is not the same
        });
        // Multiples of 1/16 up to 4: normal numbers of a few bits, whatever the scale.
        run.trainer->rounded_to = 1.f / 16;
        run.trainer->gain = [](std::uint64_t) { return 200.f; };
        const Outcome got = run.until(3);
        EXPECT_GT(got.reports[0].gradient_norm, 5);
        const Outcome& first = wanted.try_emplace(clipping, got).first->second;
        EXPECT_TRUE(got.bits == first.bits);
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_FALSE(got.reports[i].skipped);
          EXPECT_EQ(got.reports[i].gradient_norm, first.reports[i].gradient_norm);
        }
      }
    }
  }
}

// Every step may be the last of its process: the scale, what is left of the hysteresis, the window and the number of
// skipped steps go on, from the last commit.
TEST(EngineFp16, ARunThatIsInterruptedAnywhereEndsWithTheSameBitsAndScale) {
  const auto change = [](Config& config) {
    config.loss_scale = {.initial_power = 21, .window = 2, .hysteresis = 2};
    config.schedule = {.kind = ScheduleKind::kWarmup, .warmup_max_lr = 1e-2, .warmup_steps = 5};
  };
  constexpr std::uint64_t kMost = 12;
  Training whole(testing::kInHbm, change);
  const Outcome wanted = whole.until(kMost);
  expect_varied(wanted);
  for (const char* name : {"nvme", "nvme, guessing", "weights in hbm, states on nvme", "host"}) {
    for (const std::uint32_t every : {1u, 3u}) {
      for (const std::uint64_t leg : {1u, 2u, 5u}) {
        SCOPED_TRACE(std::string(name) + ", commit_every " + std::to_string(every) + ", legs of " +
                     std::to_string(leg));
        Training run(
            testing::layout_case(name),
            [&](Config& config) {
              change(config);
              config.commit_every = every;
            },
            true);
        while (run.engine->current_step() < kMost) {
          const std::uint64_t from = run.engine->current_step();
          while (run.engine->current_step() < std::min(kMost, from + leg)) {
            const StepReport report = run.trainer->run_step();
            const StepReport& expected = wanted.reports[report.step - 1];
            EXPECT_EQ(report.skipped, expected.skipped) << report.step;
            EXPECT_EQ(report.loss_scale, expected.loss_scale) << report.step;
            EXPECT_EQ(report.gradient_norm, expected.gradient_norm) << report.step;
            EXPECT_EQ(report.learning_rate, expected.learning_rate) << report.step;
          }
          const std::uint64_t to = run.engine->current_step();
          if (leg < every) run.engine->flush();  // else the engine's end does it
          run.open(OnExisting::kResume);
          EXPECT_EQ(run.engine->current_step(), to);
          if (to == kMost) break;
          const auto blob = run.engine->blob();
          ASSERT_EQ(blob.size(), sizeof(std::uint64_t)) << "the caller's, and nothing of the scaler's";
        }
        EXPECT_TRUE(run.until(kMost).bits == wanted.bits);
        EXPECT_EQ(run.engine->loss_scale(), whole.engine->loss_scale());
      }
    }
  }
}

// A commit of a skipped step is a record, and no tile: neither of those that are in memory.
TEST(EngineFp16, ASkippedStepWritesNoTile) {
  for (const LayoutCase& layout : testing::layout_cases()) {
    if (layout.states == Placement::kHbm) continue;
    SCOPED_TRACE(layout.name);
    Training run(
        layout,
        [&](Config& config) {
          config.commit_every = 1;
          config.gradient_clipping = 0.5;
        },
        true);
    const Plan plan = make_plan(run.config, run.model);
    EXPECT_TRUE(run.trainer->run_step().skipped);
    run.engine->flush();
    run.trainer->gain = [](std::uint64_t) { return 1e3f; };
    const StepReport report = run.trainer->run_step();  // skipped as well; written since: the record of the first
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.nvme_write_bytes, 2 * record_bytes(record_form(plan)) + plan.spill_bytes);
  }
}

TEST(EngineFp16, AtTheSmallestScaleAnOverflowIsAnErrorThatChangesNothing) {
  const auto change = [](Config& config) {
    config.gradient_clipping = 0;
    config.loss_scale = {.initial_power = 1, .window = 100, .hysteresis = 1, .least = 1};
  };
  for (const LayoutCase& layout : testing::layout_cases()) {
    SCOPED_TRACE(layout.name);
    Training run(layout, change), reference(testing::in_hbm_like(layout), change);
    reference.trainer->gain = run.trainer->gain = [](std::uint64_t step) { return step == 2 ? 1e8f : 1.f; };
    reference.until(2);
    run.until(2);
    EXPECT_EQ(run.engine->loss_scale(), 1);
    run.trainer->poison_step = 3;
    try {
      run.trainer->run_step();
      ADD_FAILURE() << "nothing was refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kNonFinite);
      EXPECT_STREQ(error.what(),
                   "h.1.weight of block h.1: NaN or Inf in its gradient in step 3 at the smallest loss scale, 1; "
                   "nothing was changed; lower the learning rate or look at the data of this step");
    }
    EXPECT_EQ(run.engine->current_step(), 2u);
    run.trainer->poison_step = 0;
    EXPECT_TRUE(run.until(5).bits == reference.until(5).bits);
    EXPECT_EQ(run.engine->loss_scale(), 1);
  }
}

TEST(EngineFp16, ASkippedStepIsSaidWithItsTensor) {
  std::vector<std::string> lines;
  Training run(testing::layout_case("nvme"), [](Config& config) { config.loss_scale = {.hysteresis = 1}; });
  run.trainer->poison_step = 1;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  run.trainer->run_step();
  run.trainer->run_step();
  set_log_sink([](LogLevel, std::string_view) {});
  std::erase_if(lines, [](const std::string& line) { return line.find("skipped") == std::string::npos; });
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "step 1 is skipped: NaN or Inf in the gradient of h.1.weight of block h.1 at loss scale 65536; 32768 from "
            "now on");
}

TEST(EngineFp16, ASinkThatThrowsLeavesNoStepHalfDone) {
  const auto with_sink = [](const LogSink& sink) {
    Training run(testing::layout_case("nvme"), [](Config& config) { config.loss_scale = {.hysteresis = 1}; });
    run.trainer->poison_step = 2;
    set_log_sink(sink);
    for (int step = 0; step < 3; ++step) run.trainer->run_step();
    set_log_sink([](LogLevel, std::string_view) {});
    return std::pair(run.engine->loss_scale(), testing::exported(*run.engine));
  };
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(with_sink([](LogLevel, std::string_view) { throw std::runtime_error("a full disk"); }), with_sink({}));
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("spillway: the log sink threw at: step 2 is skipped"),
            std::string::npos);
}

TEST(EngineFp16, AWeightThatFp16DoesNotHoldIsNamedAndTheEngineTakesOthers) {
  TempStore store;
  const ModelDescription model = testing::toy_model(2, 1000, 1);
  const Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kFloat16, store.path());
  auto engine = Engine::create(config, model);
  for (const float bad : {65520.f, -7e4f}) {
    const WeightSource source = [&](std::uint32_t block, std::uint32_t parameter, std::uint64_t first,
                                    std::span<float> out) {
      testing::toy_weights()(block, parameter, first, out);
      if (block == 2 && parameter == 1) out.back() = bad;
    };
    try {
      engine->import_weights(source);
      ADD_FAILURE() << bad << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_EQ(error.parts().object, "h.2.bias");
      EXPECT_NE(error.parts().happened.find("fp16 ends at 65,504"), std::string::npos) << error.what();
    }
  }
  engine->import_weights([](auto, auto, auto, std::span<float> out) { std::ranges::fill(out, 65519.f); });
  engine->export_weights(false, [](auto, auto, auto, std::span<const float> values) { EXPECT_EQ(values[0], 65504); });
  engine->export_weights(true, [](auto, auto, auto, std::span<const float> values) { EXPECT_EQ(values[0], 65519); });
}

TEST(EngineFp16, TheBlobIsAsLargeAsWhatTheScalerLeavesOfARecord) {
  Training run(testing::layout_case("nvme"));
  run.trainer->blob.resize(kBlobCapacity / 8);
  EXPECT_THROW(run.trainer->run_step(), Error);
  run.engine->step(std::as_bytes(std::span(run.trainer->blob).first(kBlobCapacity / 8 - 4)));
  run.open(OnExisting::kResume);
  EXPECT_EQ(run.engine->blob().size(), kBlobCapacity - 32);
}

}  // namespace
}  // namespace spillway
