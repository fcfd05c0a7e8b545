// A plan made ahead is the plan of the run, and its parts agree with the engine that makes one.
#include "tools/plan/prediction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "spillway/engine.h"
#include "spillway/error.h"
#include "tests/aio/temp_files.h"
#include "tools/models/trainer.h"
#include "tools/plan/alternatives.h"
#include "tools/plan/options.h"
#include "tools/plan/report.h"

namespace spillway::planning {
namespace {

using models::parse_shape;
using models::shape_of_size;

constexpr std::uint32_t kSequence = 16;

ModelShape small_shape() {
  return parse_shape(R"({"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512,
                         "n_positions": 32})",
                     "small");
}

Config small_config(Placement states, Placement parameters) {
  Config config;
  config.weights = DType::kBFloat16;
  config.states = states;
  config.parameters = parameters;
  config.threads = 2;
  config.tile_elements = 16 << 10;
  config.device = DeviceKind::kHost;
  return config;
}

Rates plain_rates(const Config& config) {
  return choose_rates(config, DeviceKind::kHost, {.device = 1e11, .read = 2e9, .write = 1e9}, {}, 2);
}

constexpr Placement kPlacements[][2] = {{Placement::kHbm, Placement::kHbm},   {Placement::kHost, Placement::kHbm},
                                        {Placement::kHost, Placement::kHost}, {Placement::kNvme, Placement::kHbm},
                                        {Placement::kNvme, Placement::kHost}, {Placement::kHost, Placement::kNvme},
                                        {Placement::kNvme, Placement::kNvme}};

TEST(PlanPrediction, ReservesWhatTheEngineReserves) {
  for (const auto& [states, parameters] : kPlacements) {
    for (const std::uint32_t accumulation : {1u, 2u}) {
      const testing::TempDir directory;
      Config config = small_config(states, parameters);
      config.gradient_accumulation = accumulation;
      config.nvme_paths = {directory.path() / "store"};
      config.host_bytes = 24 << 20;
      const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
      const Prediction made = predict(config, described, plain_rates(config), 1);

      const models::Trainer trainer(*small_shape().gpt2, models::trainer_options(config, DeviceKind::kHost, kSequence));
      const auto engine = Engine::create(config, trainer.description());
      const Ledger& planned = made.plan.ledger;
      const Ledger& run = engine->ledger();
      ASSERT_EQ(planned.reservations.size(), run.reservations.size());
      for (std::size_t i = 0; i < run.reservations.size(); ++i) {
        EXPECT_EQ(planned.reservations[i].purpose, run.reservations[i].purpose);
        EXPECT_EQ(planned.reservations[i].bytes, run.reservations[i].bytes) << run.reservations[i].purpose;
        EXPECT_EQ(planned.reservations[i].tier, run.reservations[i].tier);
      }
      EXPECT_EQ(planned.hbm_budget, run.hbm_budget);
      EXPECT_EQ(planned.host_budget, run.host_budget);
      EXPECT_EQ(planned.nvme_budget, run.nvme_budget);
    }
  }
}

TEST(PlanPrediction, MovesTheBytesThatARunMoves) {
  const testing::TempDir directory;
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {directory.path() / "store"};
  config.speculative_blocks = 0;
  const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
  const Prediction made = predict(config, described, plain_rates(config), 1);
  models::Trainer trainer(*small_shape().gpt2, models::trainer_options(config, DeviceKind::kHost, kSequence));
  const auto engine = Engine::create(config, trainer.description());
  engine->import_weights([](auto, auto, auto, std::span<float> out) { std::ranges::fill(out, 0.01f); });
  trainer.attach(*engine);
  const std::vector<std::uint32_t> rows(kSequence + 1, 3);
  constexpr int kSteps = 30;
  StepReport sum;
  for (int step = 0; step < 2 + kSteps; ++step) {
    trainer.run_step(rows);
    const StepReport report = engine->step();
    if (step < 2) continue;
    sum.nvme_read_bytes += report.nvme_read_bytes;
    sum.nvme_write_bytes += report.nvme_write_bytes;
    sum.d2h_bytes += report.d2h_bytes;
  }
  // Steps share what is read ahead and written afterwards: at most the buffers, once.
  std::uint64_t places = 0;
  for (const Region& place : made.plan.hbm.places) places += place.bytes;
  const auto in_flight =
      static_cast<double>(made.plan.host.buffers.bytes + std::min(places, made.plan.host.chunks.bytes));
  const auto expected = [&](std::uint64_t bytes) { return static_cast<double>(bytes * kSteps); };
  EXPECT_NEAR(static_cast<double>(sum.nvme_read_bytes), expected(made.step.traffic.nvme_read), in_flight);
  EXPECT_NEAR(static_cast<double>(sum.nvme_write_bytes), expected(made.step.traffic.nvme_write), in_flight);
  EXPECT_LT(in_flight, expected(made.step.traffic.nvme_read) / 2) << "too little moves to tell";
  EXPECT_EQ(sum.d2h_bytes, kSteps * made.step.traffic.d2h);
}

TEST(PlanPrediction, TakesLongerWithASlowerDriveAndNoLongerWithAFasterOne) {
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {"/none"};
  const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
  Rates rates = plain_rates(config);
  const double usual = predict(config, described, rates, 1).step.seconds;
  for (double* rate : {&rates.links.nvme_read, &rates.links.nvme_write, &rates.links.nvme_mixed}) *rate /= 10;
  const Prediction slow = predict(config, described, rates, 1);
  EXPECT_GT(slow.step.seconds, 2 * usual);
  EXPECT_EQ(slow.schedule.limit(), Link::kNvme);
  for (double* rate : {&rates.links.nvme_read, &rates.links.nvme_write, &rates.links.nvme_mixed}) *rate *= 100;
  EXPECT_LE(predict(config, described, rates, 1).step.seconds, usual);
}

TEST(PlanPrediction, ComputesOnceMoreWhatHbmHasNoRoomFor) {
  Config config = small_config(Placement::kHost, Placement::kHost);
  const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
  const Rates rates = plain_rates(config);
  const Prediction least = predict(config, described, rates, 1);
  EXPECT_EQ(least.visits_recomputed, 4u);
  config.hbm_bytes = least.plan.ledger.total(Placement::kHbm) + (64 << 20);
  const Prediction roomy = predict(config, described, rates, 1);
  EXPECT_EQ(roomy.visits_recomputed, 0u);
  double again = 0, sum = 0;
  for (const VisitWork& work : described.work) {
    again += work.again_flops;
    sum += work.flops;
  }
  const auto compute = [](const Prediction& made) { return made.schedule.busy[static_cast<int>(Link::kCompute)]; };
  EXPECT_NEAR(compute(roomy), sum / 1e11, 1e-9);
  EXPECT_NEAR(compute(least), (sum + again) / 1e11, 1e-9);
}

TEST(PlanPrediction, CommitsAsOftenAsCostsTwoPercent) {
  Config config = small_config(Placement::kHost, Placement::kHost);
  config.nvme_paths = {"/none"};
  const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
  Rates rates = plain_rates(config);
  // A step takes a second, so that the drive and not the clock's last digits decide.
  rates.links.nvme_read = rates.links.nvme_write = rates.links.nvme_mixed = 2e7;
  for (double* rate : {&rates.compute.forward, &rates.compute.backward, &rates.compute.head}) *rate = 5e7;
  const Prediction made = predict(config, described, rates, 1);
  ASSERT_GT(made.commit_every, 1u);
  EXPECT_LE(made.step.seconds, 1.0201 * made.schedule.seconds());
  EXPECT_GT(made.commit_seconds, 0.02 * made.schedule.seconds() * (made.commit_every - 1));
  config.commit_every = 1;
  const Prediction every = predict(config, described, rates, 1);
  EXPECT_EQ(every.commit_every, 1u);
  EXPECT_GT(every.step.seconds, made.step.seconds);
  EXPECT_GT(every.step.traffic.nvme_write, made.step.traffic.nvme_write);
  config.commit_every = 0;
  const Prediction never = predict(config, described, rates, 1);
  EXPECT_EQ(never.commit_every, 0u);
  EXPECT_EQ(never.step.traffic.nvme_write, 0u);
}

// 7 B parameters in 1,587 tiles, and the same in a fifth of that.
TEST(PlanPrediction, JoinedTilesMoveTheSameBytesInAboutTheSameTime) {
  for (const Placement parameters : {Placement::kNvme, Placement::kHost}) {
    Config config = small_config(Placement::kNvme, parameters);
    config.nvme_paths = {"/none"};
    config.tile_elements = 4 << 20;
    config.host_bytes = 48ull << 30;
    const DescribedModel described = describe(shape_of_size(7e9, 256), config, {.sequence = 256});
    const Rates rates = choose_rates(config, DeviceKind::kCuda, {}, {}, 16);
    const Prediction exact = predict(config, described, rates, 1, {.most_tiles = 1 << 20, .tries = 4});
    const Prediction joined = predict(config, described, rates, 1, {.most_tiles = 300, .tries = 4});
    EXPECT_EQ(exact.joined, 1u);
    EXPECT_GT(joined.joined, 4u);
    EXPECT_EQ(exact.schedule.traffic.h2d, joined.schedule.traffic.h2d);
    EXPECT_EQ(exact.schedule.traffic.d2h, joined.schedule.traffic.d2h);
    EXPECT_EQ(exact.clipped.traffic.nvme_read, joined.clipped.traffic.nvme_read);
    EXPECT_EQ(exact.clipped.traffic.nvme_write, joined.clipped.traffic.nvme_write);
    EXPECT_NEAR(joined.clipped.seconds / exact.clipped.seconds, 1, 0.02);
    EXPECT_EQ(totals_of(exact.plan).host, totals_of(joined.plan).host);
  }
}

TEST(PlanPrediction, OffersWhatWouldMakeATokenCheaper) {
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {"/none"};
  const Question question{.config = config,
                          .shape = small_shape(),
                          .run = {.sequence = kSequence},
                          .rates = plain_rates(config),
                          .has_drive = true};
  const DescribedModel described = describe(question.shape, config, question.run);
  const Alternatives found = find_alternatives(question, described, 4);
  ASSERT_EQ(found.table.size(), std::size(kPlacements));
  EXPECT_EQ(std::ranges::count(found.table, true, &PlacementRow::chosen), 1);
  EXPECT_TRUE(found.table.back().chosen);
  for (const PlacementRow& row : found.table) {
    const Config there = [&] {
      Config other = config;
      other.states = row.states;
      other.parameters = row.parameters;
      return other;
    }();
    ASSERT_TRUE(row.bytes);
    EXPECT_EQ(row.bytes->hbm, totals_of(make_plan(there, described.model)).hbm) << place_text(row);
  }
  ASSERT_FALSE(found.changes.empty());
  EXPECT_LE(found.changes.size(), 4u);
  EXPECT_TRUE(std::ranges::is_sorted(found.changes, {}, &Change::effect));
  for (const Change& change : found.changes) EXPECT_LE(change.effect, -0.01) << change.what;
}

TEST(PlanPrediction, SaysOfEachPlacementWhatItLacks) {
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {"/none"};
  const ModelShape large = parse_shape(
      R"({"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 32})",
      "large");
  const Question whole{.config = config, .shape = large, .run = {.sequence = kSequence}, .rates = plain_rates(config)};
  const DescribedModel described = describe(whole.shape, config, whole.run);
  Question question = whole;
  question.config.host_bytes = totals_of(make_plan(config, described.model)).host;
  const Alternatives found = find_alternatives(question, described, 4);
  const auto row = std::ranges::find_if(found.table, [](const PlacementRow& at) {
    return at.states == Placement::kHost && at.parameters == Placement::kHost;
  });
  ASSERT_NE(row, found.table.end());
  EXPECT_NE(row->refused.find("host_bytes"), std::string::npos);
  ASSERT_TRUE(row->bytes) << "what it would take";
  EXPECT_GT(row->bytes->host, *question.config.host_bytes);
  EXPECT_TRUE(found.table.back().refused.empty());
}

TEST(PlanPrediction, BusyPartsAddUpToTheLanesTime) {
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {"/none"};
  const DescribedModel described = describe(small_shape(), config, {.sequence = kSequence});
  Rates rates = plain_rates(config);
  rates.links.device_on_cores = false;  // nothing shares anything, so that an operation takes its own time
  rates.links.cores = 1000;
  const Schedule schedule = predict(config, described, rates, 1).schedule;
  double sum = 0;
  constexpr std::size_t kParts = 37;
  for (const double part : busy_parts(schedule, Lane::kH2d, kParts)) {
    EXPECT_GE(part, 0);
    EXPECT_LE(part, 1);
    sum += part * schedule.seconds() / kParts;
  }
  EXPECT_NEAR(sum, schedule.busy[static_cast<int>(Link::kH2d)], 1e-9);
  EXPECT_GT(sum, 0);
}

TEST(PlanRates, TakeWhatIsGivenBeforeWhatWasMeasured) {
  Config config = small_config(Placement::kNvme, Placement::kNvme);
  config.nvme_paths = {"/none", "/other"};
  MeasuredRates measured;
  measured.links = MachineRates{.nvme_read = 3e9, .nvme_write = 2e9, .nvme_mixed = 2.2e9, .h2d = 5e9, .d2h = 6e9};
  const Rates rates = choose_rates(config, DeviceKind::kHost, {.read = 7e9}, measured, 4);
  EXPECT_EQ(rates.links.nvme_read, 7e9);
  EXPECT_EQ(rates.links.nvme_write, 2e9);
  EXPECT_EQ(rates.links.nvme_mixed, 4.5e9) << "that of the measured drive is of another one";
  EXPECT_EQ(rates.links.h2d, 5e9);
  EXPECT_EQ(rates.links.cores, 4u);
  const auto source = [&](const char* key) { return std::ranges::find(rates.lines, key, &RateLine::key)->source; };
  EXPECT_EQ(source("nvme_read"), "--read-rate");
  EXPECT_EQ(source("nvme_write"), "measured here");
  EXPECT_EQ(source("memory"), "typical");
  const Rates typical = choose_rates(config, DeviceKind::kHost, {}, {}, 4);
  config.nvme_paths.pop_back();
  EXPECT_EQ(typical.links.nvme_read, 2 * choose_rates(config, DeviceKind::kHost, {}, {}, 4).links.nvme_read);
}

TEST(PlanOptions, NameEverythingThatIsWrong) {
  TypedOptions typed;
  typed.hbm = "x";
  typed.nvme = {"=1TB", "/a=1TB", "/b"};
  typed.read_rate = "fast";
  const std::vector<std::string> problems = understand(typed).problems;
  ASSERT_EQ(problems.size(), 5u);
  for (const std::string& problem : problems) {
    EXPECT_NE(problem.find(": "), std::string::npos) << problem;
    EXPECT_NE(problem.find("; "), std::string::npos) << problem;
  }
  typed = {.parameters = "7B"};
  EXPECT_TRUE(understand(typed).problems.empty());
  typed.nvme = {"/a=1TB", "/b=1TB"};
  const UnderstoodOptions two = understand(typed);
  EXPECT_TRUE(two.problems.empty());
  EXPECT_EQ(two.options.config.nvme_bytes, 2'000'000'000'000u);
  EXPECT_EQ(two.options.config.nvme_paths.size(), 2u);
  typed.nvme = {"/a=1TB", "/./a=1TB"};
  EXPECT_EQ(understand(typed).problems,
            std::vector<std::string>{"--nvme: \"/a\" is named twice, once as \"/./a\"; name "
                                     "a directory on every drive, once"});
}

}  // namespace
}  // namespace spillway::planning
