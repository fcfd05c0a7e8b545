// Values of single parameters are read and written between steps and inside of one, in every layout, and a run goes on
// with them to the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using enum ParameterValues;
using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kWritten = 3, kSteps = 5;

std::vector<float> read(Engine& engine, ParameterValues of, std::uint32_t block, std::uint32_t parameter) {
  std::vector<float> found;
  engine.read_values(of, block, parameter, [&](auto b, auto p, std::uint64_t first, std::span<const float> values) {
    EXPECT_EQ((std::pair{b, p}), (std::pair{block, parameter}));
    EXPECT_EQ(first, found.size());
    found.insert(found.end(), values.begin(), values.end());
  });
  return found;
}

void write(Engine& engine, ParameterValues of, std::uint32_t block, std::uint32_t parameter, float factor) {
  std::vector<float> values(read(engine, of, block, parameter).size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = factor * std::fabs(testing::mixed(block, parameter, i));
  engine.write_values(of, block, parameter, values);
}

std::optional<Code> code_of(const std::function<void()>& call) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    return error.code();
  }
}

class EngineValues : public ::testing::TestWithParam<double> {
 protected:
  static LayoutRun run_to_write(const LayoutCase& layout) {
    LayoutRun run(layout, DType::kBFloat16, [](Config& config) { config.gradient_clipping = GetParam(); });
    while (run.engine->current_step() < kWritten) run.trainer->run_step();
    return run;
  }
  // Calls `act` after the backward pass of the next step, and goes on to the end.
  static std::vector<std::uint32_t> act_before_step(LayoutRun& run, const std::function<void(Engine&)>& act) {
    const std::size_t visits = run.model.blocks.size() * 2 + 1;
    std::size_t seen = 0, all = visits * (run.in_turn ? LayoutCase::kMicroBatches : 1);
    run.trainer->between = [&] {
      if (seen++ == all) act(*run.engine);
    };
    run.trainer->run_step();
    run.trainer->between = [] {};
    return run.until(kSteps).bits;
  }
  // Whether blocks are updated inside backward whatever comes, or their gradients are on NVMe.
  static bool keeps_gradients(const LayoutCase& layout) {
    LayoutRun run = run_to_write(layout);
    std::optional<Code> code;
    act_before_step(run, [&](Engine& engine) { code = code_of([&] { read(engine, kGradient, 1, 0); }); });
    EXPECT_TRUE(!code || *code == Code::kUnsupported);
    return !code;
  }
};

INSTANTIATE_TEST_SUITE_P(, EngineValues, ::testing::Values(0.0, 0.5, 100.0), [](const auto& info) {
  return info.param == 0 ? "Unclipped" : info.param < 1 ? "Clipped" : "BelowTheLimit";
});

void write_some(Engine& engine) {
  write(engine, kMaster, 1, 0, 0.5f);
  write(engine, kMaster, 0, 1, 0.25f);
  write(engine, kExpAvg, 0, 0, 0.125f);
  write(engine, kExpAvgSq, 2, 1, 0.75f);
}

TEST_P(EngineValues, WhatIsWrittenBetweenStepsIsReadAndTrainedOn) {
  std::map<std::uint64_t, std::vector<std::uint32_t>> wanted;
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    if (wanted[layout.kind()].empty()) {
      LayoutRun like = run_to_write(testing::in_hbm_like(layout));
      write_some(*like.engine);
      wanted[layout.kind()] = like.until(kSteps).bits;
    }
    LayoutRun run = run_to_write(layout);
    const auto others = read(*run.engine, kMaster, 1, 1), state = read(*run.engine, kExpAvg, 1, 0);
    write_some(*run.engine);
    const auto found = read(*run.engine, kMaster, 1, 0);
    ASSERT_EQ(found.size(), testing::count_of(run.model.blocks[1].parameters[0]));
    EXPECT_EQ(found.back(), 0.5f * std::fabs(testing::mixed(1, 0, found.size() - 1)));
    EXPECT_EQ(read(*run.engine, kMaster, 1, 1), others);
    EXPECT_EQ(read(*run.engine, kExpAvg, 1, 0), state);
    EXPECT_EQ(read(*run.engine, kExpAvgSq, 2, 1)[7], 0.75f * std::fabs(testing::mixed(2, 1, 7)));
    EXPECT_TRUE(run.until(kSteps).bits == wanted[layout.kind()]);
  }
}

TEST_P(EngineValues, InsideOfAStepItCountsForItsUpdate) {
  std::map<std::uint64_t, std::vector<std::uint32_t>> wanted;
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    if (wanted[layout.kind()].empty()) {
      LayoutRun like = run_to_write(testing::in_hbm_like(layout));
      wanted[layout.kind()] = act_before_step(like, write_some);
    }
    LayoutRun run = run_to_write(layout);
    std::optional<Code> code;
    const auto bits = act_before_step(run, [&](Engine& engine) { code = code_of([&] { write_some(engine); }); });
    if (code) {
      EXPECT_EQ(*code, Code::kInvalidArgument);  // partly updated
      EXPECT_EQ(GetParam(), 0.0);
    } else {
      EXPECT_TRUE(bits == wanted[layout.kind()]);
    }
  }
}

TEST_P(EngineValues, AnotherGradientIsTakenInTheOnesPlace) {
  std::map<std::uint64_t, std::vector<std::uint32_t>> wanted;
  std::map<std::uint64_t, std::vector<float>> gradient;
  const auto change = [](Engine& engine) {
    write(engine, kGradient, 1, 0, 0.5f);
    write(engine, kGradient, 0, 1, 0.25f);
  };
  for (const LayoutCase& layout : testing::layout_cases(GetParam())) {
    SCOPED_TRACE(layout.name);
    if (wanted[layout.kind()].empty()) {
      LayoutRun like = run_to_write(testing::in_hbm_like(layout));
      wanted[layout.kind()] = act_before_step(like, [&](Engine& engine) {
        gradient[layout.kind()] = read(engine, kGradient, 2, 0);
        change(engine);
      });
    }
    if (!keeps_gradients(layout)) continue;
    LayoutRun run = run_to_write(layout);
    const auto bits = act_before_step(run, [&](Engine& engine) {
      EXPECT_EQ(read(engine, kGradient, 2, 0), gradient[layout.kind()]);
      change(engine);
      const auto found = read(engine, kGradient, 1, 0);
      EXPECT_EQ(found[5], bf16_to_float(float_to_bf16(0.5f * std::fabs(testing::mixed(1, 0, 5)))));
    });
    EXPECT_TRUE(bits == wanted[layout.kind()]);
  }
}

TEST_P(EngineValues, TheStoreHasThemAtOnce) {
  for (const char* name : {"nvme", "nvme, guessing", "weights in hbm, states on nvme"}) {
    LayoutRun run = run_to_write(testing::layout_case(name));
    write(*run.engine, kMaster, 1, 0, 0.5f);
    const auto kept = read(*run.engine, kMaster, 1, 0);
    run.open(OnExisting::kResume);
    EXPECT_EQ(run.engine->current_step(), kWritten);
    EXPECT_EQ(read(*run.engine, kMaster, 1, 0), kept);
    testing::end_and_expect_store_at(run, kWritten);
  }
}

TEST_P(EngineValues, WhatCannotBeIsRefusedWithNothingChanged) {
  LayoutRun run = run_to_write(testing::layout_case("nvme"));
  const auto before = testing::exported(*run.engine);
  Engine& engine = *run.engine;
  const auto refused = [&](const std::function<void()>& call) {
    EXPECT_EQ(code_of(call), Code::kInvalidArgument);
    EXPECT_TRUE(testing::exported(engine) == before);
  };
  refused([&] { read(engine, kMaster, 99, 0); });
  refused([&] { read(engine, kMaster, 0, 99); });
  refused([&] { read(engine, kGradient, 1, 0); });
  refused([&] { write(engine, kMaster, 1, 0, NAN); });
  refused([&] { write(engine, kExpAvg, 1, 0, INFINITY); });
  {
    const Lease lease = engine.acquire(1, Pass::kForward, engine.stream());
    EXPECT_EQ(code_of([&] { write(engine, kMaster, 1, 0, 0.5f); }), Code::kInvalidArgument);
  }
  struct Mine {};
  EXPECT_THROW(engine.read_values(kMaster, 1, 0, [](auto...) { throw Mine{}; }), Mine);
  refused([&] { engine.write_values(kMaster, 1, 0, std::vector<float>(5)); });
  refused([&] { engine.write_values(kMaster, 1, 0, read(engine, kMaster, 1, 0), 1); });
  EXPECT_TRUE(testing::exported(engine) == before);
  run.until(kSteps);
}

TEST(EngineBetas, AreThoseOfTheStepsThatCome) {
  const auto bits = [](bool by_config) {
    LayoutRun run(testing::kInHbm, DType::kBFloat16, [&](Config& config) {
      if (by_config) config.optimizer.beta1 = 0.5, config.optimizer.beta2 = 0.75;
    });
    if (!by_config) run.engine->set_betas(0.5, 0.75);
    return run.until(kWritten).bits;
  };
  EXPECT_TRUE(bits(true) == bits(false));
  LayoutRun run(testing::kInHbm, DType::kBFloat16);
  EXPECT_EQ(code_of([&] { run.engine->set_betas(1.0, 0.5); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([&] { run.engine->set_betas(0.5, NAN); }), Code::kInvalidArgument);
  run.trainer->between = [&, seen = 0]() mutable {
    if (seen++ != 8) return;
    EXPECT_EQ(code_of([&] { run.engine->set_betas(0.5, 0.5); }), Code::kInvalidArgument);
  };
  run.trainer->run_step();
}

}  // namespace
}  // namespace spillway
