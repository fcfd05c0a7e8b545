#include "src/plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "spillway/units.h"
#include "tests/src/plan/input_by_hand.h"
#include "tests/src/plan/schedule_check.h"
#include "tests/src/random_model.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

using testing::check_schedule;
using testing::config_for;

constexpr std::uint64_t kLayer = 64 * kKiB, kEmbedding = 5 * kLayer;  // elements: extents are as long as payloads

// GPT-2: a tied embedding that is the head too, and layers. Everything of a layer is two tiles.
ModelDescription gpt2(std::uint32_t layers) {
  ModelDescription model;
  model.blocks.push_back({"wte", {{.name = "wte", .shape = {kEmbedding}, .pushes = 2}}});
  for (std::uint32_t l = 0; l < layers; ++l) {
    model.blocks.push_back({"h." + std::to_string(l), {{.name = "h." + std::to_string(l), .shape = {kLayer}}}});
  }
  auto visit = [&](std::uint32_t block, Pass pass) { model.visits.push_back({block, pass}); };
  for (std::uint32_t b = 0; b <= layers; ++b) visit(b, Pass::kForward);
  visit(0, Pass::kBackward);
  for (std::uint32_t b = layers; b > 0; --b) visit(b, Pass::kBackward);
  visit(0, Pass::kBackward);
  return model;
}

Config nvme_config() {
  Config config = config_for(Placement::kNvme, Placement::kNvme);
  config.tile_elements = kLayer / 2;
  return config;
}

// A drive and links of 1 GB/s and no time for anything else, until a test says so.
MachineRates plain_rates() {
  return {.cores = 2,
          .device_on_cores = false,
          .nvme_read = 1e9,
          .nvme_write = 1e9,
          .nvme_mixed = 2e9,
          .h2d = 1e9,
          .d2h = 1e9};
}

ScheduleInput gpt2_input(std::uint32_t layers, std::uint32_t places, const MachineRates& rates,
                         double compute_seconds = 0, bool clips = true) {
  const ModelDescription model = gpt2(layers);
  Config config = nvme_config();
  if (!clips) config.gradient_clipping = 0;
  if (places < 3) {
    const Plan roomy = make_plan(config, model);
    config.hbm_bytes = roomy.ledger.total(Placement::kHbm) - (3 - places) * kLayer * 2;
  }
  const Plan plan = make_plan(config, model);
  EXPECT_EQ(plan.hbm.places.size(), places);
  const std::vector<double> seconds(plan.visits.size(), compute_seconds);
  return schedule_input(plan, rates, seconds);
}

// Per parameter 12 bytes are read for the update and 2 for backward, 12 written, 4 go up, 2 down. With p >= 3 places
// the embedding and the last p - 1 layers of forward are still there when backward begins. With two, the one that the
// embedding fits serves every other layer too: the embedding comes three times, and the last layer stays only where it
// has the small place. With one place nothing stays.
TEST(Schedule, MovesTheBytesOfTheClosedForm) {
  for (const std::uint32_t layers : {8u, 9u}) {
    const std::uint64_t elements = kEmbedding + layers * kLayer;
    for (const std::uint32_t places : {1u, 2u, 3u}) {
      const ScheduleInput input = gpt2_input(layers, places, plain_rates());
      const Schedule schedule = make_schedule(input);
      check_schedule(input, schedule);
      const std::uint64_t stay = places == 1 ? 0 : places == 2 ? layers % 2 : 2;
      const std::uint64_t fetched = (places < 3 ? 2 : 0) * kEmbedding + (layers - stay) * kLayer;
      EXPECT_EQ(schedule.traffic.nvme_read, 12 * elements + 2 * fetched) << layers << ", " << places << " places";
      EXPECT_EQ(schedule.traffic.nvme_write, 12 * elements);
      EXPECT_EQ(schedule.traffic.h2d, 2 * elements + 2 * fetched);
      EXPECT_EQ(schedule.traffic.d2h, 2 * elements);
    }
  }
}

// Without clipping the layers are updated inside backward, with no place to bring their weights to: forward reads them.
// The embedding, whose gradient is the last, is updated in the next forward pass.
TEST(Schedule, AnUpdateInBackwardCostsAnotherReadOfTheWeights) {
  constexpr std::uint64_t kLayers = 8, kElements = kEmbedding + kLayers * kLayer;
  const ScheduleInput input = gpt2_input(kLayers, 3, plain_rates(), 1e-3, false);
  const Schedule schedule = make_schedule(input);
  check_schedule(input, schedule);
  EXPECT_EQ(schedule.traffic.nvme_read, 12 * kElements + 2 * (2 * kLayers - 2) * kLayer);
  EXPECT_EQ(schedule.traffic.nvme_write, 12 * kElements);
  EXPECT_EQ(schedule.traffic.h2d, 2 * kElements + 2 * (kLayers - 2) * kLayer);
  EXPECT_EQ(schedule.traffic.d2h, 2 * kElements);
}

// Where host memory has no room for gradients they are written once and read once more.
TEST(Schedule, ASpilledGradientCostsAWriteAndARead) {
  const ModelDescription model = gpt2(400);
  Config config = nvme_config();
  config.host_bytes = 24 * kMiB;
  const ScheduleInput input = schedule_input(make_plan(config, model), plain_rates(), {});
  ScheduleInput host = input;
  std::uint64_t spilled = 0;
  for (ScheduleTile& tile : host.tiles) spilled += std::exchange(tile.spill_bytes, 0);
  for (auto& block : host.policies.gradients.blocks) block.home = Placement::kHost;
  ASSERT_GT(spilled, 0u);
  const Schedule schedule = make_schedule(input), kept = make_schedule(host);
  check_schedule(input, schedule);
  EXPECT_EQ(schedule.traffic.nvme_read, kept.traffic.nvme_read + spilled);
  EXPECT_EQ(schedule.traffic.nvme_write, kept.traffic.nvme_write + spilled);
  EXPECT_EQ(schedule.traffic.d2h, kept.traffic.d2h);
}

// With nothing else to wait for, a step takes as long as the drive needs for its bytes.
TEST(Schedule, ADriveThatIsTheLimitIsNeverIdle) {
  MachineRates rates = plain_rates();
  rates.nvme_mixed = 1e9;
  rates.h2d = rates.d2h = 1e12;
  const ScheduleInput input = gpt2_input(24, 3, rates, 1e-5);
  const Schedule schedule = make_schedule(input);
  const auto bytes = static_cast<double>(schedule.traffic.nvme_read + schedule.traffic.nvme_write);
  EXPECT_EQ(schedule.limit(), Link::kNvme);
  EXPECT_GE(schedule.seconds(), bytes / 1e9 * (1 - 1e-9));
  EXPECT_LE(schedule.seconds(), bytes / 1e9 * 1.02);
}

TEST(Schedule, ComputeThatIsTheLimitNeverWaits) {
  const ScheduleInput input = gpt2_input(24, 3, plain_rates(), 0.01);
  const Schedule schedule = make_schedule(input);
  EXPECT_EQ(schedule.limit(), Link::kCompute);
  const double compute = 0.01 * static_cast<double>(input.visits.size());
  EXPECT_LE(schedule.seconds(), compute * 1.02);
  EXPECT_GE(schedule.seconds(), compute - 1e-9);
}

// On the emulated device the update and compute share the cores: the step takes both, one after the other or at once.
TEST(Schedule, OnOneSetOfCoresTheUpdateCostsComputeItsTime) {
  MachineRates rates = plain_rates();
  rates.update_seconds = 0.005 / kLayer;
  const Schedule apart = make_schedule(gpt2_input(8, 3, rates, 0.01));
  rates.device_on_cores = true;
  rates.h2d = rates.d2h = 0;
  const ScheduleInput input = gpt2_input(8, 3, rates, 0.01);
  const Schedule together = make_schedule(input);
  const double both = 0.01 * static_cast<double>(input.visits.size()) + 0.005 * 13;
  EXPECT_EQ(together.limit(), Link::kCpu);
  EXPECT_NEAR(together.busy[static_cast<std::size_t>(Link::kCpu)], both, 1e-9);
  EXPECT_GE(together.seconds(), both - 1e-9);
  EXPECT_LT(together.seconds(), both * 1.02);
  EXPECT_LT(apart.seconds(), together.seconds() - 0.03);
}

// Reads at half a second and writes at half a second overlap while both last, at half of the mixed rate each.
TEST(Schedule, ReadsAndWritesShareADrivesMixedRate) {
  ScheduleInput input{.visits = {{.block = 0, .pass = Pass::kForward}, {.block = 0, .pass = Pass::kBackward}},
                      .blocks = {{.first_tile = 0, .tiles = 2}},
                      .tiles = {},
                      .rates = {.cores = 1, .nvme_read = 1e9, .nvme_write = 1e9, .nvme_mixed = 1e9}};
  input.policies.gradients.blocks.resize(1);  // nothing comes down
  input.policies.weights.block_bytes = input.policies.weights.place_bytes = {2};
  input.policies.updates.buffers = 2;
  const std::uint64_t half = 500'000'000;
  input.tiles = {{.block = 0, .elements = 1, .read_bytes = half, .write_bytes = half, .weight_bytes = 1},
                 {.block = 0, .elements = 1, .read_bytes = half, .write_bytes = half, .weight_bytes = 1}};
  testing::tell_policies(input);
  const Schedule schedule = make_schedule(input);
  check_schedule(input, schedule);
  // 0.5 s read, 1 s read and write at once, 0.5 s write; the last tile's write ends before backward.
  const auto write = std::ranges::find(schedule.ops, OpKind::kFinishStep, &ScheduleOp::kind);
  EXPECT_NEAR(write->start, 2.0, 1e-9);
}

// A slower drive makes compute wait for it, and a slower update for that.
TEST(Schedule, SaysWhatComputeWaitsFor) {
  auto longest = [](const Schedule& schedule) {
    return static_cast<StallCause>(std::ranges::max_element(schedule.stalls.of) - schedule.stalls.of.begin());
  };
  const MachineRates fast{
      .cores = 2, .device_on_cores = false, .nvme_read = 1e12, .nvme_write = 1e12, .h2d = 1e12, .d2h = 1e12};
  MachineRates rates = fast;
  rates.nvme_read = 1e8;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kRead);
  rates = fast;
  rates.nvme_write = 1e8;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kWrite);
  rates = fast;
  rates.h2d = 1e8;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kCopy);
  rates = fast;
  rates.d2h = 1e8;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kGradient);
  rates = fast;
  rates.update_seconds = 1e-7;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kUpdate);
  rates = fast;
  rates.sync_seconds = 1;
  EXPECT_EQ(longest(make_schedule(gpt2_input(8, 3, rates, 1e-4))), StallCause::kCommit);
}

// All of an order's place assignments: a block that is not there takes any place but the one that the visit just before
// had, unless that is the only one. Returns the least number of fetches.
std::size_t least_fetches(const std::vector<std::uint32_t>& visits, std::size_t places) {
  std::vector<std::uint32_t> held(places, kNothing);
  std::function<std::size_t(std::size_t, std::size_t)> from = [&](std::size_t v, std::size_t last) -> std::size_t {
    if (v == visits.size()) return 0;
    const auto hit = std::ranges::find(held, visits[v]);
    if (hit != held.end()) return from(v + 1, static_cast<std::size_t>(hit - held.begin()));
    std::size_t least = SIZE_MAX;
    for (std::size_t p = 0; p < places; ++p) {
      if (p == last && places > 1) continue;
      const std::uint32_t before = std::exchange(held[p], visits[v]);
      least = std::min(least, 1 + from(v + 1, p));
      held[p] = before;
    }
    return least;
  };
  return from(0, kNothing);
}

// Every order of up to seven visits to up to four blocks of one size.
TEST(Schedule, FetchesTheLeastThatAnyAssignmentOfPlacesDoes) {
  constexpr std::uint64_t kBytes = 64 * kKiB;
  for (std::uint32_t count = 1; count <= 7; ++count) {
    for (std::uint32_t code = 0; code < 1u << (2 * count); ++code) {
      std::vector<std::uint32_t> visits;
      ScheduleInput input;
      for (std::uint32_t v = 0; v < count; ++v) {
        visits.push_back(code >> (2 * v) & 3);
        input.visits.push_back({.block = visits.back(), .pass = Pass::kForward});
      }
      for (std::uint32_t b = 0; b < 4; ++b) {
        input.blocks.push_back({.first_tile = b, .tiles = 1});
        input.policies.weights.block_bytes.push_back(kBytes);
        input.tiles.push_back({.block = b, .fetch_bytes = kBytes, .weight_bytes = kBytes});
      }
      testing::tell_policies(input);
      input.chunk_bytes = kBytes;
      input.chunks = 2;
      for (std::size_t places = 1; places <= 3; ++places) {
        input.policies.weights.place_bytes.assign(places, kBytes);
        const Schedule schedule = make_schedule(input);
        ASSERT_EQ(schedule.traffic.nvme_read, least_fetches(visits, places) * kBytes)
            << "order " << code << " of " << count << ", " << places << " places";
      }
    }
  }
}

// Inputs of layers for several micro-batches, of which HBM holds a few.
TEST(Schedule, MovesActivationsOutOfHbmAndBack) {
  constexpr std::uint32_t kLayers = 6, kMicroBatches = 4;
  ModelDescription model = gpt2(kLayers);
  model.activation_uses = testing::transformer_uses(kLayers, kMicroBatches);
  model.activations.assign((kLayers + 1) * kMicroBatches, {.bytes = kMiB});
  model.activations_held = 2;
  Config config = nvme_config();
  config.hbm_bytes = make_plan(config, model).ledger.total(Placement::kHbm) - 20 * kMiB;
  std::vector<double> compute(2 * kLayers + 3, 1e-2);
  double without = 0;
  for (const bool on_nvme : {false, true}) {
    if (on_nvme) config.host_bytes = make_plan(config, model).ledger.total(Placement::kHost) - 20 * kMiB;
    const Plan plan = make_plan(config, model);
    std::uint64_t down = 0, up = 0, written = 0, read = 0;
    for (std::size_t u = 0; u < plan.activations.uses.size(); ++u) {
      const UsePlace& use = plan.activations.uses[u];
      const bool nvme = plan.activations.homes[model.activation_uses[u].activation].home == Placement::kNvme;
      down += use.spill, written += use.spill && nvme;
      up += use.fetch, read += use.fetch && nvme;
    }
    ASSERT_GT(down, 0u);
    ASSERT_EQ(written > 0, on_nvme);
    const ScheduleInput input = schedule_input(plan, plain_rates(), compute);
    ScheduleInput resident = input;
    resident.uses.clear();
    const Schedule moving = make_schedule(input), staying = make_schedule(resident);
    check_schedule(input, moving);
    EXPECT_EQ(moving.traffic.d2h - staying.traffic.d2h, down * kMiB);
    EXPECT_EQ(moving.traffic.h2d - staying.traffic.h2d, up * kMiB);
    EXPECT_EQ(moving.traffic.nvme_write - staying.traffic.nvme_write, written * kMiB);
    EXPECT_EQ(moving.traffic.nvme_read - staying.traffic.nvme_read, read * kMiB);
    EXPECT_GE(moving.seconds(), staying.seconds());
    if (on_nvme) {
      EXPECT_GT(moving.seconds(), without);
    }
    without = moving.seconds();
  }
}

}  // namespace
}  // namespace spillway
