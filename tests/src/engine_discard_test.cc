// A step that its caller cannot finish, an evaluation in between, in every mode of a step: whoever goes on gets the
// bits of a run without it. (engine_nonfinite_test.cc: a step that the engine refuses to finish.)
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "spillway/error.h"
#include "tests/seed.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kSteps = 5;  // from the third on, blocks are updated on a guess
constexpr std::uint32_t kVisits = 11;

struct GivenUp {};  // the caller's own exception

class EngineDiscard : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }

  // Bits at the end of a run that nothing interrupts.
  const std::vector<std::uint32_t>& wanted(const LayoutCase& layout) {
    auto& bits = wanted_[{GetParam(), layout.kind()}];
    if (bits.empty()) bits = LayoutRun(testing::in_hbm_like(layout), DType::kBFloat16, clip).until(kSteps).bits;
    return bits;
  }

  // An exception comes before one of the step's visits, or one of its pushes.
  static void give_up_before_visit(LayoutRun& run, std::uint64_t visit) {
    run.trainer->between = [left = visit]() mutable {
      if (left-- == 0) throw GivenUp();
    };
    EXPECT_THROW(run.trainer->run_step(), GivenUp);
    run.trainer->between = [] {};
  }
  static void give_up_before_push(LayoutRun& run, std::uint64_t push) {
    run.trainer->gain = [left = push](std::uint64_t) mutable {
      if (left-- == 0) throw GivenUp();
      return 3.f;  // nothing of these gradients may be left
    };
    EXPECT_THROW(run.trainer->run_step(), GivenUp);
    run.trainer->gain = [](std::uint64_t) { return 1.f; };
  }
  static void evaluate(LayoutRun& run, std::uint32_t blocks) {
    for (std::uint32_t b = 0; b < blocks; ++b) run.engine->acquire(b, Pass::kForward, run.engine->stream());
  }

 private:
  using Key = std::pair<double, std::uint64_t>;  // clipping, a layout's kind
  static inline std::map<Key, std::vector<std::uint32_t>> wanted_;
};

INSTANTIATE_TEST_SUITE_P(, EngineDiscard, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

TEST_P(EngineDiscard, AStepThatWasGivenUpLeavesNothing) {
  std::mt19937_64 random(test_seed());
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun run(layout, DType::kBFloat16, clip);
    run.engine->discard_step();  // there is none
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      for (int times = 0; times < 2; ++times) {
        const std::uint64_t visit = random() % (kVisits + 1), push = random() % 20;
        SCOPED_TRACE("step " + std::to_string(step) + ", visit " + std::to_string(visit) + ", push " +
                     std::to_string(push));
        give_up_before_visit(run, visit);
        run.engine->discard_step();
        EXPECT_EQ(run.engine->current_step(), step - 1);
        give_up_before_push(run, push);
        run.engine->discard_step();
      }
      const StepReport report = run.trainer->run_step();
      EXPECT_EQ(report.step, step);
      // Without given visits the first step shows them, and what was given up is none.
      if (layout.visits || step > 1) {
        EXPECT_EQ(report.unplanned_visits, 0u);
      }
    }
    EXPECT_TRUE(testing::exported(*run.engine) == wanted(layout));
  }
}

TEST_P(EngineDiscard, LeavesTheStoreAtTheLastStep) {
  constexpr std::uint64_t kStopped = 3;
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    const auto change = [](Config& config) {
      clip(config);
      config.commit_every = 1;
    };
    LayoutRun run(layout, DType::kBFloat16, change, true);
    while (run.engine->current_step() < kStopped) run.trainer->run_step();
    give_up_before_visit(run, kVisits);  // every gradient has been pushed
    run.engine->discard_step();
    run.engine->flush();
    testing::end_and_expect_store_at(run, kStopped);
    run.open(OnExisting::kResume);
    EXPECT_TRUE(run.until(kSteps).bits == wanted(layout));
  }
}

TEST_P(EngineDiscard, AnEvaluationBetweenStepsIsFetchedAsPlanned) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun run(layout, DType::kBFloat16, clip);
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      for (std::uint32_t blocks : {5u, 5u, 2u}) evaluate(run, blocks);  // the last is given up
      if (!layout.visits && step == 1) run.engine->discard_step();
      const StepReport report = run.trainer->run_step();
      if (layout.visits || step > 1) {
        EXPECT_EQ(report.unplanned_visits, 0u);
      }
    }
    EXPECT_TRUE(testing::exported(*run.engine) == wanted(layout));
  }
}

TEST(EngineDiscardUse, IsRefusedWhileALeaseIsHeld) {
  LayoutRun run(testing::layout_case("nvme"), DType::kFloat32);
  run.trainer->run_step();
  std::optional<Lease> lease = run.engine->acquire(0, Pass::kForward, run.engine->stream());
  try {
    run.engine->discard_step();
    ADD_FAILURE() << "it was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_STREQ(error.what(),
                 "discard_step: a lease is still held; release every block and activation before discard_step()");
  }
  lease.reset();
  run.engine->discard_step();
  EXPECT_TRUE(run.until(3).bits == LayoutRun(testing::kInHbm, DType::kFloat32).until(3).bits);
}

// It is part of a forward pass that keeps a block, and none of an evaluation.
TEST(EngineDiscardUse, AVisitWhileALeaseIsHeldBeginsNothing) {
  LayoutRun run(testing::layout_case("nvme"), DType::kFloat32, {});
  run.trainer->run_step();
  run.trainer->between = [&run, visit = 0]() mutable {
    if (++visit != 3) return;
    const Lease held = run.engine->acquire(2, Pass::kForward, run.engine->stream());
    run.engine->acquire(0, Pass::kForward, run.engine->stream());  // unplanned, as block 2 is held
  };
  EXPECT_EQ(run.trainer->run_step().unplanned_visits, 2u);
}

}  // namespace
}  // namespace spillway
