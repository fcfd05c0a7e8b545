// Updates on the guess that clipping has no effect: which steps guess, and that no bit tells a right guess from a wrong
// one or from none.
#include "src/engine/clip_guess.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "tests/src/toy_trainer.h"

namespace spillway {
namespace {

using testing::TempStore;
using testing::ToyTrainer;

Plan plan_of_blocks(std::initializer_list<bool> speculative) {
  Plan plan;
  for (const bool block : speculative) {
    plan.blocks.emplace_back();
    plan.blocks.back().speculative = block;
  }
  return plan;
}

std::optional<std::uint32_t> not_asked() {
  ADD_FAILURE() << "the number is given";
  return 0;
}

TEST(ClipGuess, GuessesAfterTwoStepsWithoutClipping) {
  const Plan plan = plan_of_blocks({false, true, true, true});
  ClipGuess speculation(plan, 2);
  const auto takes = [&] {
    speculation.begin_step();
    for (std::uint32_t b = 4; b-- > 0;) speculation.take(b);
    return speculation.taken();
  };
  EXPECT_EQ(takes(), 0u) << "nothing is known yet";
  speculation.end_step(false, not_asked);
  EXPECT_EQ(takes(), 0u);
  speculation.end_step(false, not_asked);
  EXPECT_EQ(takes(), 2u);
  EXPECT_EQ(speculation.blocks(), 2u);
  speculation.end_step(true, not_asked);
  EXPECT_EQ(takes(), 0u) << "the guess was wrong";
  EXPECT_EQ(speculation.blocks(), 0u);
  speculation.end_step(false, not_asked);
  EXPECT_EQ(takes(), 0u);
  speculation.end_step(false, not_asked);
  EXPECT_EQ(takes(), 2u);
  EXPECT_FALSE(ClipGuess(plan, 4).take(0)) << "block 0 cannot be taken back";
}

TEST(ClipGuess, TakesAsManyBlocksAsTheForecastFindsBest) {
  const Plan plan = plan_of_blocks({false, true, true, true});
  ClipGuess speculation(plan, std::nullopt);
  std::uint32_t asked = 0;
  const auto best = [&asked]() -> std::optional<std::uint32_t> { return ++asked; };
  for (int step = 0; step < 10; ++step) speculation.end_step(false, best);
  EXPECT_EQ(asked, 2u);
  EXPECT_EQ(speculation.blocks(), 2u);
  const Plan none = plan_of_blocks({false, false});
  ClipGuess nothing_to_choose(none, std::nullopt);
  for (int step = 0; step < 10; ++step) nothing_to_choose.end_step(false, not_asked);
}

TEST(ClipGuess, SpreadsTheBlocksOverBackward) {
  Plan plan = plan_of_blocks({false, true, true, true, true, true});
  for (std::uint32_t b = 0; b < 6; ++b) plan.visits.push_back({b, Pass::kForward});
  for (std::uint32_t b : {2u, 5u, 4u, 3u, 1u, 2u, 0u}) plan.visits.push_back({b, Pass::kBackward});
  const std::vector<std::uint32_t> expected[] = {{}, {5}, {5, 3}, {5, 4, 1}, {5, 4, 3, 1}, {5, 4, 3, 1, 2}};
  for (std::uint32_t count = 0; count < 6; ++count) EXPECT_EQ(speculated_blocks(plan, count), expected[count]) << count;
  EXPECT_EQ(speculated_blocks(plan, 100), expected[5]) << "block 2 comes back after block 1";
}

// Steps 4, 8 and 11 have gradients that are clipped; the others' norm is below the limit.
constexpr int kSteps = 12;
constexpr double kLimit = 100;
float bursts(std::uint64_t step) { return step == 4 || step == 8 || step == 11 ? 1e3f : 1.f; }
float overflows(std::uint64_t step) { return step == 4 ? 1e25f : 1.f; }  // its square is infinite

struct Outcome {
  std::vector<std::uint32_t> bits;
  std::vector<StepReport> reports;
};

class SpeculativeRun {
 public:
  SpeculativeRun(DType type, std::optional<std::uint32_t> blocks, Placement placement = Placement::kNvme,
                 double limit = kLimit)
      : config_(testing::toy_config(placement, placement, type, store_.path())) {
    config_.gradient_clipping = limit;
    config_.speculative_blocks = blocks;
    start(OnExisting::kRefuse);
    engine->import_weights(testing::toy_weights());
  }

  void start(OnExisting on_existing) {
    engine.reset();
    engine = Engine::create(config_, model_, {.on_existing = on_existing, .poison_released = true});
  }

  ToyTrainer trainer() {
    ToyTrainer made{*engine, model_, config_.weights, 1};
    made.gain = gain;
    return made;
  }

  Outcome run(int steps = kSteps) {
    Outcome result;
    ToyTrainer all = trainer();
    for (int step = 0; step < steps; ++step) result.reports.push_back(all.run_step());
    result.bits = testing::exported(*engine);
    return result;
  }

  std::function<float(std::uint64_t)> gain = bursts;
  std::unique_ptr<Engine> engine;

 private:
  TempStore store_;
  const ModelDescription model_ = testing::toy_model(6, 3000, 1);
  Config config_;
};

TEST(EngineSpeculation, NoBitTellsWhetherAGuessWasRight) {
  for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
    const auto expected = SpeculativeRun(type, 0, Placement::kHbm).run().bits;
    for (const std::uint32_t blocks : {0u, 1u, 3u, 100u}) {
      const Outcome run = SpeculativeRun(type, blocks).run();
      EXPECT_TRUE(run.bits == expected) << blocks;
      for (std::size_t i = 0; i < run.reports.size(); ++i) {
        const StepReport& report = run.reports[i];
        // Two steps before it were not clipped: 3, 4, 7, 8, 11.
        const bool guesses =
            report.step == 3 || report.step == 4 || report.step == 7 || report.step == 8 || report.step == 11;
        EXPECT_EQ(report.speculative_blocks, guesses ? std::min(blocks, 6u) : 0) << report.step;
        EXPECT_EQ(report.taken_back, blocks > 0 && guesses && bursts(report.step) > 1) << report.step;
      }
    }
  }
}

TEST(EngineSpeculation, AnUpdateThatOverflowsOnAWrongGuessIsTakenBack) {
  SpeculativeRun reference(DType::kBFloat16, 0, Placement::kHbm), speculative(DType::kBFloat16, 3);
  reference.gain = speculative.gain = overflows;
  const Outcome expected = reference.run(6), run = speculative.run(6);
  EXPECT_TRUE(run.reports[3].taken_back);
  EXPECT_TRUE(run.bits == expected.bits);
}

TEST(EngineSpeculation, AnUpdateThatOverflowsOnARightGuessIsRefusedAsAnyOther) {
  SpeculativeRun reference(DType::kBFloat16, 0, Placement::kHbm),
      speculative(DType::kBFloat16, 3, Placement::kNvme, 1e37);
  speculative.gain = overflows;
  speculative.run(3);
  ToyTrainer trainer = speculative.trainer();
  try {
    const StepReport report = trainer.run_step();
    EXPECT_EQ(report.speculative_blocks, 3u);
    EXPECT_TRUE(report.taken_back);
    testing::exported(*speculative.engine);
    ADD_FAILURE() << "infinite states went through";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kNonFinite) << error.what();
  }
  speculative.start(OnExisting::kResume);
  EXPECT_EQ(speculative.engine->current_step(), 3u);
  EXPECT_TRUE(testing::exported(*speculative.engine) == reference.run(3).bits);
}

TEST(EngineSpeculation, WhatIsUpdatedOnAGuessIsNotSeenBeforeTheStepIsDone) {
  SpeculativeRun reference(DType::kBFloat16, 0, Placement::kHbm), speculative(DType::kBFloat16, 100);
  const auto expected = reference.run(2).bits;
  speculative.run(2);
  ToyTrainer trainer = speculative.trainer();
  int visits = 0;
  trainer.between = [&] {
    if (++visits == 15) {  // before the embedding's last visit
      EXPECT_TRUE(testing::exported(*speculative.engine) == expected);
    }
  };
  EXPECT_EQ(trainer.run_step().speculative_blocks, 6u);
  EXPECT_TRUE(testing::exported(*speculative.engine) == reference.run(1).bits);
}

TEST(EngineSpeculation, AStepThatEndsInTheMiddleLeavesTheLastOne) {
  SpeculativeRun reference(DType::kBFloat16, 0, Placement::kHbm), speculative(DType::kBFloat16, 100);
  const auto expected = reference.run(4).bits;
  speculative.run(2);
  ToyTrainer trainer = speculative.trainer();
  int visits = 0;
  trainer.between = [&] {
    if (++visits == 15) throw std::runtime_error("enough");
  };
  EXPECT_THROW(trainer.run_step(), std::runtime_error);
  speculative.start(OnExisting::kResume);
  EXPECT_EQ(speculative.engine->current_step(), 2u);
  EXPECT_TRUE(speculative.run(2).bits == expected);
}

TEST(EngineSpeculation, ChosenByTheScheduleItHasTheSameBits) {
  const auto expected = SpeculativeRun(DType::kBFloat16, 0, Placement::kHbm).run().bits;
  EXPECT_TRUE(SpeculativeRun(DType::kBFloat16, std::nullopt).run().bits == expected);
}

}  // namespace
}  // namespace spillway
