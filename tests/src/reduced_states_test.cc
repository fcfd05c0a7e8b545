// Moments in bf16 and int8 train the same bits in every layout, and come back from stores and snapshots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/snapshot.h"
#include "tests/error_of.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::error_of;

using ::testing::Contains;
using ::testing::HasSubstr;
using testing::LayoutCase;
using testing::LayoutRun;
using ::testing::Not;

constexpr std::uint64_t kSaved = 3, kSteps = 5;

struct Form {
  MomentFormat moments;
  OptimizerKind optimizer;
  DType type;
  bool operator==(const Form&) const = default;
};

constexpr Form kForms[] = {{MomentFormat::kBFloat16, OptimizerKind::kAdam, DType::kBFloat16},
                           {MomentFormat::kInt8, OptimizerKind::kAdam, DType::kBFloat16},
                           {MomentFormat::kInt8, OptimizerKind::kAdam, DType::kFloat32},
                           {MomentFormat::kInt8, OptimizerKind::kAdam, DType::kFloat16},
                           {MomentFormat::kBFloat16, OptimizerKind::kLion, DType::kFloat32},
                           {MomentFormat::kInt8, OptimizerKind::kLion, DType::kBFloat16}};

std::string name_of_form(const Form& form) {
  return std::string(name_of(form.moments)) + std::string(name_of(form.optimizer)) + std::string(name_of(form.type));
}

class ReducedStates : public ::testing::TestWithParam<Form> {
 protected:
  static void change(Config& config) {
    config.moments = GetParam().moments;
    config.optimizer.kind = GetParam().optimizer;
    config.gradient_clipping = 0.5;
  }
  static LayoutRun run_of(const LayoutCase& layout, bool with_store = false) {
    return LayoutRun(layout, GetParam().type, change, with_store);
  }

  testing::TempStore directory_;
  const std::filesystem::path saved_ = directory_.path() / "saved";
};

INSTANTIATE_TEST_SUITE_P(, ReducedStates, ::testing::ValuesIn(kForms),
                         [](const auto& info) { return name_of_form(info.param); });

using Bits = std::vector<std::uint32_t>;

Bits values_of(Engine& engine, ParameterValues of, std::uint32_t block, std::uint32_t parameter) {
  Bits bits;
  engine.read_values(of, block, parameter, [&](auto, auto, auto, std::span<const float> values) {
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  });
  return bits;
}

std::vector<Bits> moments_of(Engine& engine, OptimizerKind kind) {
  std::vector<Bits> all;
  for (const std::uint32_t block : {0u, 1u, 4u}) {
    for (const std::uint32_t parameter : {0u, 1u}) {
      all.push_back(values_of(engine, ParameterValues::kExpAvg, block, parameter));
      if (has_exp_avg_sq(kind)) all.push_back(values_of(engine, ParameterValues::kExpAvgSq, block, parameter));
    }
  }
  return all;
}

TEST_P(ReducedStates, TrainTheSameBitsInEveryLayout) {
  std::map<std::uint64_t, Bits> wanted;  // by a layout's kind
  unsigned threads = 0;
  const auto form = static_cast<std::size_t>(std::ranges::find(kForms, GetParam()) - std::begin(kForms));
  for (const LayoutCase& layout : testing::layout_cases(form, std::size(kForms))) {
    SCOPED_TRACE(layout.name);
    Bits& bits = wanted[layout.kind()];
    if (bits.empty()) bits = run_of(testing::in_hbm_like(layout)).until(kSteps).bits;
    threads = threads % 3 + 1;
    LayoutRun run(layout, GetParam().type, [threads](Config& config) {
      change(config);
      config.threads = threads;
    });
    EXPECT_TRUE(run.until(kSteps).bits == bits) << threads << " threads";
  }
  const Bits exact = LayoutRun(testing::kInHbm, GetParam().type,
                               [](Config& config) {
                                 change(config);
                                 config.moments = MomentFormat::kFloat32;
                               })
                         .until(kSteps)
                         .bits;
  EXPECT_FALSE(run_of(testing::kInHbm).until(kSteps).bits == exact) << "nothing was reduced";
}

// Of int8 with Lion nothing is rounded at random.
TEST_P(ReducedStates, AnotherSeedRoundsOtherwise) {
  const auto bits_with = [](std::uint64_t seed) {
    return LayoutRun(testing::kInHbm, GetParam().type,
                     [seed](Config& config) {
                       change(config);
                       config.optimizer.seed = seed;
                     })
        .until(kSteps)
        .bits;
  };
  const bool random = GetParam().moments == MomentFormat::kBFloat16 || has_exp_avg_sq(GetParam().optimizer);
  EXPECT_EQ(bits_with(0) != bits_with(1), random);
}

// Whole granules, and so one pass with the checksums; and what is left.
TEST_P(ReducedStates, LargeTilesTrainTheBitsOfSmallOnes) {
  LayoutCase layout = testing::layout_case("nvme");
  layout.width = 130'000;
  layout.tile_elements = 256 * kKiB;
  const LayoutCase small = testing::in_hbm_like(layout);
  EXPECT_TRUE(run_of(layout).until(2).bits == run_of(small).until(2).bits);
}

TEST_P(ReducedStates, AStoreGoesOnWithTheSameBits) {
  for (const char* name : {"nvme", "weights on nvme, states in host", "weights in hbm, states on nvme"}) {
    SCOPED_TRACE(name);
    const LayoutCase layout = testing::layout_case(name);
    const Bits wanted = run_of(layout).until(kSteps).bits;
    LayoutRun run = run_of(layout);
    run.config.commit_every = 1;
    while (run.engine->current_step() < kSaved) run.trainer->run_step();
    const auto moments = moments_of(*run.engine, GetParam().optimizer);
    run.engine->flush();
    testing::end_and_expect_store_at(run, kSaved);
    EXPECT_EQ(inspect_store({run.store.path()}).moments, GetParam().moments);
    run.open(OnExisting::kResume);
    EXPECT_EQ(run.engine->current_step(), kSaved);
    EXPECT_TRUE(moments_of(*run.engine, GetParam().optimizer) == moments);
    EXPECT_TRUE(run.until(kSteps).bits == wanted);
  }
}

TEST_P(ReducedStates, ASnapshotGoesOnWithTheSameBits) {
  LayoutRun run = run_of(testing::layout_case("nvme"));
  while (run.engine->current_step() < kSaved) run.trainer->run_step();
  run.engine->save(saved_);
  EXPECT_EQ(find_snapshot(saved_)->moments, GetParam().moments);
  const auto moments = moments_of(*run.engine, GetParam().optimizer);
  const Bits wanted = run.until(kSteps).bits;
  run.engine->load_snapshot(saved_);
  EXPECT_TRUE(moments_of(*run.engine, GetParam().optimizer) == moments);
  EXPECT_TRUE(run.until(kSteps).bits == wanted);
  LayoutRun other(testing::layout_case("host"), GetParam().type, change);
  other.engine->load_snapshot(saved_);
  EXPECT_TRUE(other.until(kSteps).bits == wanted);
}

std::vector<std::string> infos;

TEST_P(ReducedStates, ASnapshotOfAnotherFormIsConvertedAndSaidOnce) {
  const LayoutCase layout = testing::layout_case("nvme");
  LayoutRun exact(layout, GetParam().type, [](Config& config) {
    change(config);
    config.moments = MomentFormat::kFloat32;
  });
  while (exact.engine->current_step() < kSaved) exact.trainer->run_step();
  exact.engine->save(saved_);
  const Bits weights = testing::exported(*exact.engine);
  const auto average = values_of(*exact.engine, ParameterValues::kExpAvg, 1, 0);

  infos.clear();
  set_log_sink([](LogLevel, std::string_view text) { infos.emplace_back(text); });
  LayoutRun run = run_of(layout);
  run.engine->load_snapshot(saved_);
  set_log_sink({});
  const std::string said = "its fp32 states become " + std::string(name_of(GetParam().moments));
  EXPECT_EQ(std::ranges::count_if(infos, [&](const std::string& line) { return line.find(said) != line.npos; }), 1);
  EXPECT_TRUE(testing::exported(*run.engine) == weights) << "the master is exact";
  EXPECT_TRUE(values_of(*run.engine, ParameterValues::kExpAvg, 1, 1) ==
              values_of(*exact.engine, ParameterValues::kExpAvg, 1, 1))
      << "vectors stay exact";
  const auto rounded = values_of(*run.engine, ParameterValues::kExpAvg, 1, 0);
  ASSERT_EQ(rounded.size(), average.size());
  std::size_t others = 0;
  for (std::size_t i = 0; i < rounded.size(); ++i) {
    const auto was = std::bit_cast<float>(average[i]), is = std::bit_cast<float>(rounded[i]);
    others += was != is;
    ASSERT_NEAR(is, was, 0.02 * std::abs(was) + 1e-3) << i;
  }
  EXPECT_GT(others, rounded.size() / 2);
  run.until(kSteps);
}

TEST_P(ReducedStates, AStoreOfAnotherFormIsRefusedAndNamesTheSnapshot) {
  const LayoutCase layout = testing::layout_case("nvme");
  LayoutRun run = run_of(layout);
  while (run.engine->current_step() < 1) run.trainer->run_step();
  run.engine->flush();
  run.engine.reset();
  for (const MomentFormat other : kMomentFormats) {
    if (other == GetParam().moments) continue;
    Config config = run.config;
    config.moments = other;
    const Error error = error_of([&] { Engine::create(config, run.model, {.on_existing = OnExisting::kResume}); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_EQ(error.parts().remedy, Remedy::kItsStatesOrSnapshot);
    EXPECT_THAT(error.what(), HasSubstr("made with " + std::string(name_of(GetParam().moments)) +
                                        " states (here: " + std::string(name_of(other)) + ")"));
  }
  Config config = run.config;
  config.exact_states = {"h.1.weight"};
  const Error error = error_of([&] { Engine::create(config, run.model, {.on_existing = OnExisting::kResume}); });
  EXPECT_EQ(error.parts().remedy, Remedy::kItsStatesOrSnapshot);
  run.open(OnExisting::kResume);
}

TEST_P(ReducedStates, SingleValuesAreWrittenAndWhatNoFormHoldsIsNamed) {
  LayoutRun run = run_of(testing::layout_case("nvme"));
  run.trainer->run_step();
  const auto put = [&](ParameterValues of, float value) {
    std::vector<float> values(testing::count_of(run.model.blocks[1].parameters[0]), 0.25f);
    values[3] = value;
    run.engine->write_values(of, 1, 0, values);
  };
  put(ParameterValues::kExpAvg, 0.25f);
  for (const std::uint32_t bits : values_of(*run.engine, ParameterValues::kExpAvg, 1, 0))
    ASSERT_NEAR(std::bit_cast<float>(bits), 0.25f, 0.002f);
  const Error nan = error_of([&] { put(ParameterValues::kExpAvg, NAN); });
  EXPECT_THAT(nan.what(), HasSubstr("h.1.weight.exp_avg: holds NaN at index 3"));
  if (GetParam().moments == MomentFormat::kInt8) {
    const Error large = error_of([&] { put(ParameterValues::kExpAvg, 2e38f); });
    EXPECT_THAT(large.what(), HasSubstr("holds 2e+38 at index 3, and int8 states end at 1.69e+38"));
  }
  if (!has_exp_avg_sq(GetParam().optimizer)) return;
  const Error negative = error_of([&] { put(ParameterValues::kExpAvgSq, -1); });
  EXPECT_THAT(negative.what(), HasSubstr("h.1.weight.exp_avg_sq: holds -1 at index 3"));
}

// A moment that fp32 holds, and a scale of int8 does not.
TEST(ReducedStatesEnd, AMomentBeyondItsFormEndsTheRunAndNamesTheTensor) {
  for (const MomentFormat moments : {MomentFormat::kFloat32, MomentFormat::kInt8}) {
    LayoutRun run(testing::layout_case("host"), DType::kFloat32, [moments](Config& config) {
      config.moments = moments;
      config.optimizer.kind = OptimizerKind::kLion;
      config.optimizer.beta2 = 0;
      config.gradient_clipping = 0;
    });
    run.trainer->pass(1, 0, LayoutCase::kMicroBatches);
    run.engine->write_values(ParameterValues::kGradient, 1, 0,
                             std::vector<float>(testing::count_of(run.model.blocks[1].parameters[0]), 2e38f));
    const auto step = [&] {
      run.engine->step();
      run.engine->flush();
    };
    if (moments == MomentFormat::kFloat32) {
      step();
      continue;
    }
    const Error error = error_of(step);
    EXPECT_EQ(error.code(), Code::kNonFinite);
    EXPECT_THAT(error.what(), HasSubstr("h.1.weight"));
  }
}

TEST(ReducedStatesPlan, SaysHowManyMomentsAreStoredHow) {
  const LayoutCase layout = testing::kInHbm;
  Config config = layout.config(DType::kBFloat16, "/nowhere");
  EXPECT_THAT(make_plan(config, layout.model()).facts, Not(Contains(HasSubstr("moments of"))));
  config.moments = MomentFormat::kInt8;
  // Four matrices of 9,000 elements, and vectors of 1,501 beside the embedding's of 21,000 and 3,000; padded.
  EXPECT_THAT(make_plan(config, layout.model()).facts,
              Contains("moments of 36864 elements are stored in int8, of 32768 in fp32"));
}

TEST(ReducedStatesPlan, RefusesAnOptimizerWithExactStatesAloneAndAPatternOfNothing) {
  const LayoutCase layout = testing::kInHbm;
  Config config = layout.config(DType::kBFloat16, "/nowhere");
  config.moments = MomentFormat::kInt8;
  for (const OptimizerKind kind : kOptimizerKinds) {
    if (can_reduce(kind)) continue;
    config.optimizer.kind = kind;
    const Error error = error_of([&] { make_plan(config, layout.model()); });
    EXPECT_THAT(error.what(), HasSubstr("spillway.states: is int8, and " + std::string(name_of(kind))));
  }
  config.optimizer.kind = OptimizerKind::kAdam;
  config.exact_states = {"wte", "lm_head*"};
  const Error error = error_of([&] { make_plan(config, layout.model()); });
  EXPECT_THAT(error.what(), HasSubstr("spillway.exact_states: \"lm_head*\" matches no trainable parameter"));
}

}  // namespace
}  // namespace spillway
