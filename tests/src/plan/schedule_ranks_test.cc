// The schedule of one rank of several: what its collectives move and wait for, and that the engine's move the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "src/plan/network_traffic.h"
#include "src/plan/schedule.h"
#include "tests/src/comm/forwarding.h"
#include "tests/src/plan/schedule_check.h"
#include "tests/src/random_model.h"
#include "tests/src/ranks_run.h"

namespace spillway {
namespace {

using testing::RankRun;
using testing::RanksCase;

using Moved = std::tuple<CollectiveKind, std::int32_t, std::uint64_t>;

// Those of one kind and block that follow each other, one for each section, are one.
void add(std::vector<Moved>& to, const Moved& call) {
  const auto [kind, block, bytes] = call;
  if (to.empty() || std::tie(std::get<0>(to.back()), std::get<1>(to.back())) != std::tie(kind, block)) {
    to.emplace_back(kind, block, 0);
  }
  std::get<2>(to.back()) += bytes;
}

// What moves a block's bytes is noted: what of each call is other ranks'.
class Counting final : public testing::Forwarding {
 public:
  using Forwarding::Forwarding;
  std::vector<Moved> moved;

 private:
  void before(const Collective& call, Stream&) override {
    if (call.kind != CollectiveKind::kAllGather && call.kind != CollectiveKind::kReduceScatter) return;
    add(moved, {call.kind, call.block, call.data.size() - call.slices[rank()]});
  }
};

// The same of a step of the schedule.
std::vector<Moved> planned(const Schedule& schedule) {
  std::vector<Moved> calls;
  for (const ScheduleOp& op : std::span(schedule.ops).subspan(schedule.second)) {
    if (op.lane != Lane::kNet || op.kind == OpKind::kAgree) continue;
    const CollectiveKind kind =
        op.kind == OpKind::kScatter ? CollectiveKind::kReduceScatter : CollectiveKind::kAllGather;
    add(calls, {kind, static_cast<std::int32_t>(op.block), op.bytes});
  }
  return calls;
}

std::uint64_t sum_of(const std::vector<Moved>& calls, CollectiveKind kind) {
  std::uint64_t sum = 0;
  for (const auto& [of, block, bytes] : calls) sum += of == kind ? bytes : 0;
  return sum;
}

// All of a block is there when it is computed, and what is rounded are the sums of all ranks. Besides what holds of
// every schedule.
void check_ranks(const ScheduleInput& input, const Schedule& schedule) {
  testing::check_schedule(input, schedule);
  constexpr double kNever = -1;
  std::vector<double> copied(input.blocks.size()), whole(copied.size(), kNever), joined(copied.size(), kNever);
  for (const ScheduleOp& op : schedule.ops) {
    if (op.block == kNothing) continue;
    switch (op.kind) {
      case OpKind::kCopyWeights: copied[op.block] = op.end; break;
      case OpKind::kGather:
        ASSERT_GE(op.start, copied[op.block]);
        whole[op.block] = op.end;
        break;
      case OpKind::kCompute:
        ASSERT_NE(whole[op.block], kNever);
        ASSERT_GE(op.start, whole[op.block]);
        break;
      case OpKind::kScatter: joined[op.block] = op.end; break;
      case OpKind::kCopyGradient:
        ASSERT_NE(joined[op.block], kNever);
        ASSERT_GE(op.start, joined[op.block]);
        break;
      default: break;
    }
  }
}

// On every rank, in every layout, in the same order.
void expect_moved_as_planned(const RanksCase& of, std::uint32_t ranks) {
  testing::TempStore store;
  testing::run_ranks(ranks, [&](Communicator& communicator) {
    Counting counting(communicator);
    RankRun run(of, &counting, store.path());
    run.until(4);
    counting.moved.clear();
    run.until(5);
    Plan plan = make_plan(run.config, run.model, 1, {run.rank, run.ranks});
    if (!plan.visits_given) return;
    ScheduleInput input = schedule_input(plan, {}, {});
    input.policies.weights.poison_released = true;  // as these engines are made
    const Schedule schedule = make_schedule(input);
    EXPECT_EQ(counting.moved, planned(schedule)) << "rank " << run.rank;
    const ScheduleTraffic& traffic = schedule.traffic;
    EXPECT_EQ(sum_of(counting.moved, CollectiveKind::kReduceScatter), traffic.scattered);
    EXPECT_EQ(sum_of(counting.moved, CollectiveKind::kAllGather), traffic.gathered + traffic.leaves);
    EXPECT_GT(traffic.gathered, 0u);
    EXPECT_GT(traffic.scattered, 0u);
  });
}

TEST(ScheduleRanks, MoveThePlannedBytesInThePlannedOrder) {
  for (const testing::LayoutCase& layout : testing::layout_cases()) {
    SCOPED_TRACE(layout.name);
    expect_moved_as_planned({.layout = layout}, 2);
  }
}

TEST(ScheduleRanks, MoveThePlannedBytesWhereSomeOwnNothing) {
  for (const char* name : {"hbm", "nvme", "weights in hbm, states in host"}) {
    SCOPED_TRACE(name);
    testing::LayoutCase layout = testing::layout_case(name);
    layout.width = 300;
    expect_moved_as_planned({.layout = layout}, 4);
    expect_moved_as_planned({.layout = layout, .change = [](Config& config) { config.gradient_clipping = 0; }}, 4);
  }
}

TEST(ScheduleRanks, MoveThePlannedBytesInEveryStage) {
  for (const char* name : {"hbm", "weights in hbm, states in host"}) {
    for (const std::uint32_t stage : {0u, 1u, 2u}) {
      SCOPED_TRACE(std::string(name) + ", stage " + std::to_string(stage));
      expect_moved_as_planned(
          {.layout = testing::layout_case(name), .change = [stage](Config& config) { config.stage = stage; }}, 2);
    }
  }
}

TEST(ScheduleRanks, MoveThePlannedBytesWithFrozenParameters) {
  for (const char* name : {"hbm", "nvme"}) {
    SCOPED_TRACE(name);
    RanksCase of{.layout = testing::layout_case(name)};
    of.describe = [](ModelDescription& model) {
      model.blocks[2].parameters[0].trainable = false;
      for (Parameter& parameter : model.blocks[3].parameters) parameter.trainable = false;
    };
    expect_moved_as_planned(of, 2);
  }
}

// Two blocks of 4 units each, on NVMe, for rank 0 of 4.
Plan plan_of_ranks(std::uint32_t ranks, Placement parameters = Placement::kNvme, DType wire = DType::kFloat32) {
  ModelDescription model;
  for (const char* name : {"a", "b"}) model.blocks.push_back({name, {{.name = name, .shape = {4, 1024}, .pushes = 1}}});
  model.visits = {{0, Pass::kForward}, {1, Pass::kBackward}, {0, Pass::kBackward}};
  Config config = testing::config_for(parameters, parameters);
  config.communication = wire;
  return make_plan(config, model, 1, {0, ranks});
}

TEST(ScheduleRanks, MoveWhatOthersOwn) {
  const BlockNetwork network = network_of(plan_of_ranks(4), 1);
  EXPECT_EQ(network.weights.bytes, 3u * 1024 * 2);
  EXPECT_EQ(network.weights.calls, 1u);
  EXPECT_EQ(network.sums.bytes, 3u * 1024 * 4);
  EXPECT_EQ(network.leaves.bytes, 3u * 8);
  EXPECT_EQ(network.leaves.calls, 2u);  // and which parameters had a gradient
  EXPECT_EQ(network_of(plan_of_ranks(1), 1).weights.calls, 0u);
  EXPECT_EQ(network_of(plan_of_ranks(4, Placement::kNvme, DType::kBFloat16), 1).sums.bytes, 3u * 1024 * 2);
}

TEST(ScheduleRanks, HaveNoNetworkWhenThereIsOne) {
  MachineRates rates{.nvme_read = 1e9, .nvme_write = 1e9, .h2d = 1e9, .d2h = 1e9, .update_seconds = 1e-9};
  const std::vector<double> compute(3, 1e-6);
  const Schedule without = make_schedule(schedule_input(plan_of_ranks(1), rates, compute));
  rates.network = 1;
  rates.network_seconds = 1;
  const Schedule with = make_schedule(schedule_input(plan_of_ranks(1), rates, compute));
  EXPECT_EQ(with.ops, without.ops);
  EXPECT_EQ(with.traffic.network(), 0u);
}

const ScheduleOp& nth(const Schedule& schedule, OpKind kind, std::uint32_t block, std::size_t n) {
  for (const ScheduleOp& op : std::span(schedule.ops).subspan(schedule.second)) {
    if (op.kind == kind && op.block == block && n-- == 0) return op;
  }
  ADD_FAILURE() << "no such operation";
  return schedule.ops[0];
}

// Forward a, backward b, backward a; b is complete in its visit.
TEST(ScheduleRanks, WaitForWhatTheEngineWaitsFor) {
  const MachineRates rates{.cores = 8,
                           .device_on_cores = false,
                           .nvme_read = 1e9,
                           .nvme_write = 1e9,
                           .h2d = 1e9,
                           .d2h = 1e9,
                           .update_seconds = 1e-9,
                           .network = 1e6,
                           .network_seconds = 1e-5};
  const ScheduleInput input = schedule_input(plan_of_ranks(4), rates, std::vector<double>(3, 1e-6));
  const Schedule schedule = make_schedule(input);
  check_ranks(input, schedule);
  const ScheduleOp& gather = nth(schedule, OpKind::kGather, 1, 0);
  EXPECT_DOUBLE_EQ(gather.seconds, 3 * 1024 * 2 / 1e6 + 1e-5);
  EXPECT_GE(gather.start, nth(schedule, OpKind::kCopyWeights, 1, 0).end);
  const ScheduleOp& compute = nth(schedule, OpKind::kCompute, 1, 0);
  EXPECT_GE(compute.start, gather.end);
  const ScheduleOp& scatter = nth(schedule, OpKind::kScatter, 1, 0);
  EXPECT_GE(scatter.start, compute.end);
  const ScheduleOp& leaves = nth(schedule, OpKind::kGatherLeaves, 1, 0);
  EXPECT_GE(leaves.start, scatter.end);
  EXPECT_GE(nth(schedule, OpKind::kCopyGradient, 1, 0).start, leaves.end);
  // The next gradient that is added may lie in the memory from which the sums go.
  EXPECT_GE(nth(schedule, OpKind::kAddSums, 0, 0).start, scatter.end);
  EXPECT_EQ(schedule.limit(), Link::kNetwork);
  EXPECT_GT(schedule.stalls[StallCause::kNetwork], 0.9 * schedule.seconds());
}

// Weights that the next visit gathers do not wait for the sums of the block before it.
TEST(ScheduleRanks, GatherAheadOfSums) {
  constexpr std::uint32_t kBlocks = 8;
  ModelDescription model;
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const std::string name = std::to_string(b);
    model.blocks.push_back({name, {{.name = name, .shape = {4, 1024}, .pushes = 1}}});
    model.visits.push_back({b, Pass::kForward});
  }
  for (std::uint32_t b = kBlocks; b-- > 0;) model.visits.push_back({b, Pass::kBackward});
  const Plan plan = make_plan(testing::config_for(Placement::kNvme, Placement::kNvme), model, 1, {0, 4});
  MachineRates rates{.nvme_read = 1e9, .nvme_write = 1e9, .h2d = 1e9, .d2h = 1e9, .update_seconds = 1e-9};
  rates.network = 1e9;
  rates.network_seconds = 1e-5;
  const Schedule schedule = make_schedule(schedule_input(plan, rates, std::vector<double>(2 * kBlocks, 1e-2)));
  for (std::uint32_t b = 1; b < kBlocks / 2; ++b) {  // long gone since forward
    const ScheduleOp& gather = nth(schedule, OpKind::kGather, b - 1, 1);
    EXPECT_LT(gather.end, nth(schedule, OpKind::kCompute, b, 1).end);
    EXPECT_LT(gather.end, nth(schedule, OpKind::kScatter, b, 0).start);
  }
}

// Whatever is planned: no rule of a schedule is broken by what ranks do.
TEST(ScheduleRanks, BreakNoRule) {
  testing::Random random;
  int made = 0;
  for (int round = 0; round < 200; ++round) {
    const ModelDescription model = random.model();
    Config config = random.config();
    config.hbm_bytes = config.host_bytes = config.nvme_bytes = std::nullopt;
    const auto ranks = static_cast<std::uint32_t>(2 + random.below(3));
    const MachineRates rates{.cores = 2,
                             .nvme_read = 1e9,
                             .nvme_write = 5e8,
                             .h2d = 1e9,
                             .d2h = 2e9,
                             .update_seconds = 1e-9,
                             .network = random.below(2) == 0 ? 1e8 : 1e10,
                             .network_seconds = 1e-6};
    try {
      const Plan plan = make_plan(config, model, 1, {0, ranks});
      const ScheduleInput input = schedule_input(plan, rates, std::vector<double>(plan.visits.size(), 1e-5));
      check_ranks(input, make_schedule(input));
      ++made;
    } catch (const Error&) {  // what a plan refuses
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(made, 50);
}

}  // namespace
}  // namespace spillway
