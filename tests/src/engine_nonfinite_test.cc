// A gradient that holds NaN or Inf, in bf16 and fp32, in every mode of a step: refused and named, with nothing changed
// but that; the store is at the last good step, and whoever goes on from there gets the bits of a run without it.
// (engine_fp16_test.cc: fp16 skips the step.)
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <tuple>

#include "spillway/error.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using testing::LayoutRun;

// After two steps that were not clipped: blocks may be updated on a guess.
constexpr std::uint64_t kLastGood = 3, kSteps = 6;

class NonFiniteGradient : public ::testing::TestWithParam<std::tuple<DType, double>> {
 protected:
  static DType type() { return std::get<0>(GetParam()); }
  static void clip(Config& config) { config.gradient_clipping = std::get<1>(GetParam()); }

  // Bits at the end of a run that no NaN comes to.
  const std::vector<std::uint32_t>& wanted(const LayoutCase& layout) {
    auto& bits = wanted_[{GetParam(), layout.kind()}];
    if (bits.empty()) bits = LayoutRun(testing::in_hbm_like(layout), type(), clip).until(kSteps).bits;
    return bits;
  }
  static void expect_refused(LayoutRun& run, std::uint32_t block, const std::string& tensor) {
    run.trainer->poison_step = kLastGood + 1;
    run.trainer->poison_block = block;
    try {
      run.trainer->run_step();
      ADD_FAILURE() << "a NaN went through";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kNonFinite);
      EXPECT_EQ(std::string(error.what()),
                tensor +
                    ": NaN or Inf in its gradient in step 4; nothing was changed; lower the learning rate or look "
                    "at the data of this step");
    }
    run.trainer->poison_step = 0;
    EXPECT_EQ(run.engine->current_step(), kLastGood);
    EXPECT_EQ(run.engine->loss_scale(), 1);
  }

 private:
  using Key = std::pair<ParamType, std::uint64_t>;  // and a layout's kind
  static inline std::map<Key, std::vector<std::uint32_t>> wanted_;
};

INSTANTIATE_TEST_SUITE_P(, NonFiniteGradient,
                         ::testing::Combine(::testing::Values(DType::kBFloat16, DType::kFloat32),
                                            ::testing::Values(0.0, 0.5, 100.0)),
                         [](const auto& info) {
                           const double clipping = std::get<1>(info.param);
                           return std::string(name_of(std::get<0>(info.param))) + (clipping == 0  ? "_unclipped"
                                                                                   : clipping < 1 ? "_clipped"
                                                                                                  : "_below_the_limit");
                         });

TEST_P(NonFiniteGradient, IsNamedAndTheRunGoesOnAsWithoutIt) {
  for (const LayoutCase& layout : testing::layout_cases(std::get<1>(GetParam()))) {
    SCOPED_TRACE(layout.name);
    LayoutRun run(layout, type(), clip);
    run.until(kLastGood);
    // The block whose gradient is complete first, and the one whose is last: nothing, and all else, is updated by then.
    expect_refused(run, 4, "h.4.weight of block h.4");
    expect_refused(run, 0, "wte of block embedding");
    EXPECT_TRUE(run.until(kSteps).bits == wanted(layout));
  }
}

TEST_P(NonFiniteGradient, LeavesTheStoreAtTheLastGoodStep) {
  for (const LayoutCase& layout : testing::layout_cases(std::get<1>(GetParam()))) {
    SCOPED_TRACE(layout.name);
    const auto change = [](Config& config) {
      clip(config);
      config.commit_every = 1;
    };
    LayoutRun run(layout, type(), change, true);
    for (std::uint64_t step = 0; step < kLastGood; ++step) run.trainer->run_step();
    expect_refused(run, 2, "h.2.weight of block h.2");
    testing::end_and_expect_store_at(run, kLastGood);
    run.open(OnExisting::kResume);
    EXPECT_EQ(run.engine->current_step(), kLastGood);
    EXPECT_TRUE(run.until(kSteps).bits == wanted(layout));
  }
}

// The blocks after the NaN come to memory of different sizes, and none of them is updated.
TEST(NonFiniteGradients, ComeBeforeBlocksOfAnySize) {
  ModelDescription model = testing::toy_model(6, 3000, 1);
  model.blocks[1].parameters[0].shape[0] *= 2;
  model.workspace_bytes *= 2;
  std::vector<std::uint32_t> expected;
  for (const bool poisoned : {false, true}) {
    testing::TempStore store;
    Config config = testing::toy_config(Placement::kNvme, Placement::kNvme, DType::kBFloat16, store.path());
    config.gradient_clipping = 0;
    const Plan plan = make_plan(config, model);
    ASSERT_LT(plan.host.passing.back().bytes, plan.blocks[1].gradient.bytes);
    auto engine = Engine::create(config, model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer{*engine, model, DType::kBFloat16, 1};
    trainer.poison_block = 6;
    trainer.poison_step = poisoned ? 1 : 0;
    if (poisoned) {
      EXPECT_THROW(trainer.run_step(), Error);
    }
    trainer.poison_step = 0;
    trainer.run_step();
    trainer.run_step();
    const auto bits = testing::exported(*engine);
    if (poisoned) {
      EXPECT_EQ(bits, expected);
    }
    expected = bits;
  }
}

// Before training, so that the values are to blame, and not the learning rate. The last of 70,000 is in a later piece.
TEST(NonFiniteWeight, IsNamedWithItsPlaceAndTheEngineTakesOthers) {
  struct Bad {
    float value;
    DType type;
    bool trainable;
    const char* happened;  // null: it is taken
  };
  const Bad cases[] = {
      {NAN, DType::kFloat32, true, "holds NaN at index 69999, before any training"},
      {-NAN, DType::kBFloat16, true, "holds NaN at index 69999, before any training"},
      {std::bit_cast<float>(0x7fffffffu), DType::kBFloat16, true, "holds NaN at index 69999, before any training"},
      {NAN, DType::kFloat16, true, "holds NaN at index 69999, before any training"},
      {-INFINITY, DType::kFloat32, true, "holds -Inf at index 69999, before any training"},
      {INFINITY, DType::kFloat16, true, "holds Inf at index 69999, before any training"},
      {3.4e38f, DType::kBFloat16, true, "holds 3.4e+38, and bf16 ends at 3.39e38"},
      {3.4e38f, DType::kFloat32, true, nullptr},
      {NAN, DType::kFloat32, false, "holds NaN at index 69999, before any training"},
      {-INFINITY, DType::kFloat32, false, nullptr},  // a mask's
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(::testing::Message() << bad.value << " in " << name_of(bad.type));
    ModelDescription model;
    model.blocks.push_back(
        {"a", {{.name = "a.mask", .shape = {70000}, .trainable = bad.trainable}, {.name = "a.weight", .shape = {8}}}});
    auto engine = Engine::create(testing::toy_config(Placement::kHbm, Placement::kHbm, bad.type, {}), model);
    const auto with = [](float last) {
      return [last](std::uint32_t, std::uint32_t parameter, std::uint64_t first, std::span<float> out) {
        std::ranges::fill(out, 0.5f);
        if (parameter == 0 && first + out.size() == 70000) out.back() = last;
      };
    };
    if (!bad.happened) {
      engine->import_weights(with(bad.value));
      continue;
    }
    try {
      engine->import_weights(with(bad.value));
      ADD_FAILURE() << "was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_EQ(error.parts().object, "a.mask");
      EXPECT_EQ(error.parts().happened, bad.happened);
    }
    engine->import_weights(with(1));
    EXPECT_EQ(engine->current_step(), 0);
  }
}

}  // namespace
}  // namespace spillway
