// A step's micro-batches are summed in Config::sum_groups parts, and these by a balanced binary tree: the bits are
// those of the definition, in every layout and whatever the order in which micro-batches go through the model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "spillway/error.h"
#include "spillway/store.h"
#include "tests/error_of.h"
#include "tests/src/layout_cases.h"

namespace spillway {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::LayoutCase;
using testing::LayoutRun;

constexpr std::uint64_t kSteps = 3;

using Bits = std::vector<std::uint32_t>;

float tree(std::vector<float> parts) {
  while (parts.size() > 1) {
    for (std::size_t i = 0; i < parts.size() / 2; ++i) parts[i] = parts[2 * i] + parts[2 * i + 1];
    parts.resize(parts.size() / 2);
  }
  return parts[0];
}

// Eight micro-batches in parts, SGD with a rate of 1: the new weights are the old ones less the sums.
class Definition : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  static constexpr std::uint32_t kMicroBatches = 8;
  static constexpr std::uint64_t kWidth = 1500;

  static Config config(const std::filesystem::path& store) {
    Config config = testing::toy_config(Placement::kHost, Placement::kHost, DType::kFloat32, store);
    config.optimizer = {.kind = OptimizerKind::kSgd, .learning_rate = 1, .weight_decay = 0};
    config.gradient_clipping = 0;
    config.gradient_accumulation = kMicroBatches;
    config.sum_groups = GetParam();
    return config;
  }
  void push(Engine& engine, std::uint32_t block, std::uint32_t parameter, std::uint32_t micro_batch,
            std::vector<std::vector<float>>& sums) {
    const std::uint64_t count = testing::count_of(model_.blocks[block].parameters[parameter]);
    std::vector<float>& values = pushed_.emplace_back(count);
    for (float& value : values) {
      value = std::ldexp(static_cast<float>(random_() % 2000) - 1000, static_cast<int>(random_() % 30) - 30);
    }
    std::vector<float>& sum = sums[micro_batch * GetParam() / kMicroBatches];
    if (sum.empty()) {
      sum = values;
    } else {
      for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
    }
    auto* const to = reinterpret_cast<float*>(engine.workspace().data());
    engine.stream().launch([to, from = values.data(), count](HostWorkers&) { std::memcpy(to, from, count * 4); });
    engine.push_gradient({.block = block, .parameter = parameter, .data = to, .micro_batch = micro_batch},
                         engine.stream());
  }

  testing::TempStore store_;
  std::mt19937 random_{7};
  std::deque<std::vector<float>> pushed_;  // until the stream has been there
  ModelDescription model_ = testing::toy_model(1, kWidth, kMicroBatches);
};
INSTANTIATE_TEST_SUITE_P(, Definition, ::testing::Values(1, 2, 4, 8));

TEST_P(Definition, IsWhatAStepSums) {
  auto engine = Engine::create(config(store_.path()), model_, {});
  engine->import_weights(testing::toy_weights());
  const Bits before = testing::exported(*engine);
  for (std::uint32_t b : {0u, 1u}) engine->acquire(b, Pass::kForward, engine->stream());
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::vector<float>>> sums;  // by parameter, then part
  const auto visit = [&](std::uint32_t block, std::vector<std::uint32_t> parameters) {
    const Lease lease = engine->acquire(block, Pass::kBackward, engine->stream());
    for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
      for (const std::uint32_t p : parameters) {
        auto& of = sums[{block, p}];
        of.resize(GetParam());
        push(*engine, block, p, m, of);
      }
    }
  };
  visit(0, {0, 1});  // the head, of a tied weight and a norm
  visit(1, {0, 1});
  visit(0, {0});
  engine->step({});
  const Bits after = testing::exported(*engine);
  std::size_t at = 0;
  for (auto& [parameter, parts] : sums) {
    for (std::size_t i = 0; i < parts[0].size(); ++i, ++at) {
      std::vector<float> of;
      for (const auto& part : parts) of.push_back(part[i]);
      const float weight = std::bit_cast<float>(before[at]) - tree(of);
      ASSERT_EQ(after[at], std::bit_cast<std::uint32_t>(weight)) << parameter.first << ' ' << parameter.second;
    }
  }
  EXPECT_EQ(at, after.size());
}

void in_two_parts(Config& config) { config.gradient_accumulation = config.sum_groups = LayoutCase::kMicroBatches; }

// The layouts differ in whether a micro-batch goes through the whole model before the next one does.
TEST(SumGroups, TrainTheSameBitsInEveryLayoutAndOrder) {
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    std::map<std::uint64_t, Bits> wanted;  // by width
    for (const LayoutCase& layout : testing::layout_cases()) {
      SCOPED_TRACE(layout.name);
      Bits& bits = wanted[layout.width];
      if (bits.empty()) bits = LayoutRun(testing::in_hbm_like(layout), type, in_two_parts).until(kSteps).bits;
      EXPECT_TRUE(LayoutRun(layout, type, in_two_parts).until(kSteps).bits == bits);
    }
  }
}

TEST(SumGroups, MicroBatchesMayComeInAnyOrderWhereTheModelSaysSo) {
  const Bits wanted = LayoutRun(testing::kInHbm, DType::kBFloat16, in_two_parts).until(kSteps).bits;
  LayoutRun run(testing::kInHbm, DType::kBFloat16, in_two_parts);
  run.trainer->swap_micro_batches = true;
  EXPECT_THAT(error_of([&] { run.trainer->run_step(); }).what(),
              HasSubstr("a gradient is of micro-batch 0, which came to an end before; push one micro-batch after"));
  for (Block& block : run.model.blocks) {
    for (Parameter& parameter : block.parameters) parameter.in_order = false;
  }
  run.open(OnExisting::kRefuse);
  run.engine->import_weights(testing::toy_weights());
  run.trainer->swap_micro_batches = true;
  EXPECT_TRUE(run.until(kSteps).bits == wanted);
}

TEST(SumGroups, CostAccumulatorsThatThePlanNames) {
  const auto bytes_with = [](std::uint32_t groups, bool in_turn) {
    Config config = testing::toy_config(Placement::kHost, Placement::kHost, DType::kBFloat16, {});
    config.gradient_accumulation = 8;
    config.sum_groups = groups;
    std::uint64_t bytes = 0;
    for (const Reservation& line : make_plan(config, testing::toy_model(2, 4096, 8, true, in_turn)).ledger.reservations)
      bytes += line.purpose.starts_with("gradient accumulators") ? line.bytes : 0;
    return bytes;
  };
  const std::uint64_t tied = 4096 * 8 * 4, layer = (4096 * 3 + 3072) * 4;
  EXPECT_EQ(bytes_with(1, false), tied + layer) << "one for all layers";
  EXPECT_EQ(bytes_with(4, false), 4 * tied + 3 * layer);
  EXPECT_EQ(bytes_with(8, false), 8 * tied + 4 * layer);
  EXPECT_EQ(bytes_with(8, true), 4 * (tied + 2 * layer));
}

TEST(SumGroups, WhatDoesNotFitIsRefused) {
  const auto refusal = [](std::uint32_t micro_batches, std::uint32_t groups, std::uint32_t pushes) {
    Config config = testing::toy_config(Placement::kHost, Placement::kHost, DType::kBFloat16, {});
    config.gradient_accumulation = micro_batches;
    config.sum_groups = groups;
    return std::string(error_of([&] { make_plan(config, testing::toy_model(2, 4096, pushes)); }).what());
  };
  EXPECT_THAT(refusal(6, 4, 8), HasSubstr("spillway.sum_groups: 4 with 6 micro-batches a step; take a power of two"));
  EXPECT_THAT(refusal(6, 3, 6), HasSubstr("spillway.sum_groups: 3 with 6 micro-batches a step"));
  EXPECT_THAT(refusal(8, 4, 6), HasSubstr("norm: expects 6 gradients a step, which are no 4 parts"));

  LayoutRun run(testing::kInHbm, DType::kBFloat16, in_two_parts);
  Engine& engine = *run.engine;
  const Lease lease = engine.acquire(1, Pass::kBackward, engine.stream());
  EXPECT_THAT(error_of([&] {
                engine.push_gradient({.block = 1, .data = engine.workspace().data(), .micro_batch = 2},
                                     engine.stream());
              }).what(),
              HasSubstr("h.1.weight: a gradient is of micro-batch 2, and a step has 2"));
}

TEST(SumGroups, ArePartOfAStoresIdentity) {
  LayoutRun run(testing::layout_case("nvme"), DType::kBFloat16, in_two_parts);
  const Bits wanted = run.until(kSteps).bits;
  run.engine->flush();
  testing::end_and_expect_store_at(run, kSteps);
  run.config.sum_groups = 1;
  EXPECT_THAT(error_of([&] { run.open(OnExisting::kResume); }).what(), HasSubstr("made with sum_groups 2 (here: 1)"));
  in_two_parts(run.config);
  run.open(OnExisting::kResume);
  EXPECT_TRUE(testing::exported(*run.engine) == wanted);
}

}  // namespace
}  // namespace spillway
