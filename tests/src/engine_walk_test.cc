// An export or a snapshot after a step makes that step's update while it looks at every tile, in every mode of a step:
// what it sees is what the step leaves, and what goes wrong with it is no matter of the training.
#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <tuple>

#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kWalked = 4, kSteps = 6;  // blocks are updated on a guess by then

class EngineWalk : public ::testing::TestWithParam<double> {
 protected:
  static void clip(Config& config) { config.gradient_clipping = GetParam(); }

  // Bits after so many steps that nobody looked at.
  const std::vector<std::uint32_t>& wanted(const LayoutCase& layout, std::uint64_t steps) {
    auto& bits = wanted_[{GetParam(), layout.kind(), steps}];
    if (bits.empty()) bits = LayoutRun(testing::in_hbm_like(layout), DType::kBFloat16, clip).until(steps).bits;
    return bits;
  }

 private:
  using Key = std::tuple<double, std::uint64_t, std::uint64_t>;  // clipping, a layout's kind, steps
  static inline std::map<Key, std::vector<std::uint32_t>> wanted_;
};

INSTANTIATE_TEST_SUITE_P(, EngineWalk, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

TEST_P(EngineWalk, SeesEveryTileAsTheStepLeavesItAndLeavesItSo) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    LayoutRun run(layout, DType::kBFloat16, clip);
    while (run.engine->current_step() < kWalked) run.trainer->run_step();
    EXPECT_TRUE(testing::exported(*run.engine) == wanted(layout, kWalked)) << "with an update to make";
    EXPECT_TRUE(testing::exported(*run.engine) == wanted(layout, kWalked)) << "with none";
    run.trainer->run_step();
    EXPECT_TRUE(run.until(kSteps).bits == wanted(layout, kSteps));
  }
}

TEST_P(EngineWalk, GivesUpWhenItsSinkThrowsButNotTheUpdate) {
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    for (const int calls : {0, 1, 7}) {
      LayoutRun run(layout, DType::kBFloat16, clip);
      while (run.engine->current_step() < kWalked) run.trainer->run_step();
      int left = calls;
      const auto throws = [&left](auto&&...) {
        if (left-- == 0) throw std::runtime_error("no room");
      };
      EXPECT_THROW(run.engine->export_weights(true, throws), std::runtime_error);
      EXPECT_EQ(left, -1) << "it was asked again";
      EXPECT_TRUE(run.until(kSteps).bits == wanted(layout, kSteps));
    }
  }
}

}  // namespace
}  // namespace spillway
