// Wherever tensors live, however small memory is and however many threads there are: the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "src/plan/plan.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::kInHbm;
using testing::LayoutCase;
using testing::LayoutRun;

// Of the runs that are compared layout by layout; SPILLWAY_STEPS, which tools/test.sh sets, says how many.
const std::uint64_t kSteps =
    std::getenv("SPILLWAY_STEPS") ? std::strtoull(std::getenv("SPILLWAY_STEPS"), nullptr, 10) : 5;

using Change = std::function<void(Config&)>;

std::vector<std::uint32_t> train(const LayoutCase& layout, DType type, std::uint64_t steps = kSteps,
                                 const Change& change = {}) {
  LayoutRun run(layout, type, change);
  const auto [bits, reports] = run.until(steps);
  for (const StepReport& report : reports) {
    EXPECT_NE(std::isfinite(report.gradient_norm), report.skipped);
    if (layout.visits || &report != &reports.front()) {
      EXPECT_EQ(report.unplanned_visits, 0u) << layout.name;
    }
  }
  return bits;
}

std::vector<LayoutCase> layouts() {
  using enum Placement;
  constexpr std::uint64_t kLarge = 4 << 20;
  return {
      {.name = "host", .parameters = kHost, .states = kHost, .tile_elements = kLarge},
      {.name = "weights in hbm, states in host", .states = kHost, .tile_elements = kLarge},
      {.name = "weights in hbm, states on nvme", .states = kNvme, .tile_elements = kLarge},
      {.name = "weights in host, states on nvme", .parameters = kHost, .states = kNvme, .tile_elements = kLarge},
      {.name = "weights on nvme, states in host", .parameters = kNvme, .states = kHost, .tile_elements = kLarge},
      {.name = "nvme", .parameters = kNvme, .states = kNvme, .tile_elements = kLarge},
      {.name = "nvme, least memory",
       .parameters = kNvme,
       .states = kNvme,
       .tile_elements = kLarge,
       .host = LayoutCase::kLeastHost,
       .least_hbm = true},
      {.name = "nvme, small tiles, least memory, 1 thread, threads engine",
       .parameters = kNvme,
       .states = kNvme,
       .host = LayoutCase::kLeastHost,
       .least_hbm = true,
       .threads = 1,
       .io_engine = IoEngineKind::kThreads},
      {.name = "nvme, small tiles, 5 threads",
       .parameters = kNvme,
       .states = kNvme,
       .tile_elements = 5120,
       .threads = 5},
      {.name = "two nvme paths, libaio",
       .parameters = kNvme,
       .states = kNvme,
       .tile_elements = 8192,
       .io_engine = IoEngineKind::kLibaio,
       .rates = {3, 1}},
      {.name = "three nvme paths, least memory",
       .parameters = kNvme,
       .states = kNvme,
       .tile_elements = kLarge,
       .host = LayoutCase::kLeastHost,
       .least_hbm = true,
       .rates = {1, 2, 1}},
      {.name = "nvme, visits recorded", .parameters = kNvme, .states = kNvme, .tile_elements = kLarge, .visits = false},
  };
}

class SameBits : public ::testing::TestWithParam<DType> {};

TEST_P(SameBits, WhereverATensorLives) {
  const auto expected = train(kInHbm, GetParam());
  for (const LayoutCase& layout : layouts()) EXPECT_EQ(train(layout, GetParam()), expected) << layout.name;
}

// Without clipping, what lies on NVMe is updated inside backward.
void without_clipping(Config& config) { config.gradient_clipping = 0; }

TEST_P(SameBits, WhereverATensorLivesWithoutClipping) {
  const auto expected = train(kInHbm, GetParam(), kSteps, without_clipping);
  EXPECT_NE(expected, train(kInHbm, GetParam()));
  for (const LayoutCase& layout : layouts()) {
    EXPECT_EQ(train(layout, GetParam(), kSteps, without_clipping), expected) << layout.name;
  }
}

INSTANTIATE_TEST_SUITE_P(, SameBits, ::testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

Change optimizer_of(OptimizerKind kind) {
  return [kind](Config& config) {
    config.optimizer.kind = kind;
    config.optimizer.momentum = 0.9;
    config.no_decay = true;  // the toy's norm and biases
    config.parameter_groups = {{.parameters = {"h.2.*", "h.3.bias"}, .learning_rate = 5e-3, .weight_decay = {}},
                               {.parameters = {"wte"}, .learning_rate = {}, .weight_decay = 0.1}};
  };
}

class SameBitsOf : public ::testing::TestWithParam<OptimizerKind> {};

// Every optimizer, with parameter groups whose ends lie inside tiles.
TEST_P(SameBitsOf, TheOptimizerWhereverATensorLives) {
  for (const DType type : kDTypes) {
    const Change change = optimizer_of(GetParam());
    const auto expected = train(kInHbm, type, kSteps, change);
    for (const LayoutCase& layout : layouts()) {
      const bool chosen = layout.least_hbm || layout.parameters != layout.states;
      if (chosen) {
        EXPECT_EQ(train(layout, type, kSteps, change), expected) << layout.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SameBitsOf, ::testing::ValuesIn(kOptimizerKinds),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(EngineBits, AGroupOfAllParametersIsTheOptimizersOwnValues) {
  const LayoutCase nvme = testing::layout_case("nvme");
  const auto grouped = train(nvme, DType::kBFloat16, 3, [](Config& config) {
    config.parameter_groups = {{.parameters = {"*"}, .learning_rate = 3e-3, .weight_decay = 0.2}};
  });
  EXPECT_EQ(grouped, train(nvme, DType::kBFloat16, 3, [](Config& config) {
              config.optimizer.learning_rate = 3e-3;
              config.optimizer.weight_decay = 0.2;
            }));
  EXPECT_NE(grouped, train(nvme, DType::kBFloat16, 3));
  EXPECT_NE(train(nvme, DType::kBFloat16, 3, [](Config& config) { config.no_decay = true; }),
            train(nvme, DType::kBFloat16, 3));
}

// The rates that a schedule would give, given by the caller step by step; also to blocks that are updated in backward.
TEST(EngineBits, AGivenRateTrainsLikeOneOfASchedule) {
  Config scheduled;
  scheduled.schedule.kind = ScheduleKind::kWarmup;
  scheduled.schedule.warmup_max_lr = 1e-2;
  scheduled.schedule.warmup_steps = 3;
  scheduled.schedule.logarithmic_warmup = false;
  for (const double clipping : {0.0, 1.0}) {
    std::vector<std::uint32_t> bits[2];
    for (const bool given : {false, true}) {
      LayoutRun run(testing::layout_case("nvme"), DType::kFloat32, [&](Config& config) {
        config.gradient_clipping = clipping;
        config.parameter_groups = {{.parameters = {"h.2.*"}, .learning_rate = 5e-3, .weight_decay = {}}};
        if (!given) config.schedule = scheduled.schedule;
      });
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const double rate = learning_rate(scheduled, step);
        if (given) run.engine->set_learning_rate(rate);
        EXPECT_EQ(run.trainer->run_step().learning_rate, rate);
      }
      bits[given] = testing::exported(*run.engine);
    }
    EXPECT_EQ(bits[0], bits[1]);
  }
}

// Given visits or recorded ones, whose gradients come one block after the other or not; what is spilled is not updated
// inside backward.
TEST(EngineBits, OfGradientsThatAreSpilled) {
  for (const double clipping : {1.0, 0.0}) {
    for (const bool visits : {true, false}) {
      LayoutCase layout = testing::layout_case("nvme, gradients spilled");
      layout.visits = visits, layout.least_hbm = true;
      layout.width = 150'000, layout.tile_elements = 100 * 1024;
      const auto clip = [clipping](Config& config) { config.gradient_clipping = clipping; };
      LayoutRun spilled(layout, DType::kBFloat16, clip), expected(testing::in_hbm_like(layout), DType::kBFloat16, clip);
      EXPECT_GT(make_plan(spilled.config, spilled.model).spill_bytes, 0u);
      EXPECT_EQ(spilled.until(3).bits, expected.until(3).bits) << "clipping " << clipping << ", visits " << visits;
    }
  }
}

}  // namespace
}  // namespace spillway
