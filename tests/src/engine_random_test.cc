// Random models, budgets, knobs and callers: every layout trains to the bits of everything in HBM, whatever the drive
// does, and comes back from its last commit. SPILLWAY_SEED=random draws other cases, SPILLWAY_CASES says how many;
// SPILLWAY_CASE=... one alone.
//
// The engine's call of IoQueue::create arrives here (`--wrap`, meson.build), for a drive that misbehaves.
#include <gtest/gtest.h>

#include <atomic>
#include <sstream>

#include "aio/io_engine.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"
#include "tests/aio/faulty_engine.h"
#include "tests/aio/forwarding_queue.h"
#include "tests/src/random_training.h"
#include "tests/src/watchdog.h"

namespace spillway {
namespace {

// What the drive does to the pieces that come while `armed`.
struct Drive {
  std::atomic<bool> armed = false;
  std::uint64_t seed = 0;
  testing::FaultRates rates;
  std::atomic<std::int64_t> fails_in = -1;  // pieces until one fails; -1: none
  int error = EIO;
  bool rots = false;  // that one is torn, or reads a flipped bit
  std::atomic<bool> failed = false;
};
Drive drive;

testing::FaultScript script_of(const Drive& from) {
  auto seeded = testing::seeded_faults(from.seed, from.rates, 4096);
  return [seeded](const IoPiece& piece) mutable {
    if (!drive.armed) return testing::Fault{};
    if (drive.fails_in < 0 || drive.fails_in-- > 0) return seeded(piece);
    drive.failed = true;
    testing::Fault fault;
    if (piece.op == IoOp::kRead && drive.rots) {
      fault.flipped_bit = drive.seed % (8 * piece.bytes);
    } else {
      fault.error = drive.error;
      if (piece.op == IoOp::kWrite && drive.rots) fault.stored_sectors = drive.seed;  // torn
    }
    return fault;
  };
}

}  // namespace

std::unique_ptr<IoQueue> real_queue(const IoQueueOptions&, Files, Regions) __asm__("__real_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> faulty_queue(const IoQueueOptions&, Files, Regions) __asm__("__wrap_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> faulty_queue(const IoQueueOptions& options, Files files, Regions regions) {
  if (drive.seed == 0) return real_queue(options, files, regions);
  check_options(options, files);
  const IoEngineOptions below{.depth = total_depth(options, files.size()),
                              .block_bytes = options.block_bytes,
                              .files = files,
                              .regions = regions};
  auto engine = options.engine == IoEngineKind::kThreads ? make_threads_engine(below) : make_uring_engine(below);
  testing::FaultPlan plan{.script = script_of(drive), .seed = drive.seed, .takes_fewer = 0.05, .reorder = true};
  plan.files.assign(files.begin(), files.end());
  return make_queue(options, files, testing::make_faulty_engine(std::move(engine), std::move(plan)));
}

namespace {

using testing::RandomCaller;
using testing::RandomCase;
using testing::TempStore;
using testing::Watchdog;

std::string text_of(const RandomCase& random, const Config& config) {
  std::ostringstream text;
  text << "blocks";
  for (const Block& block : random.model.blocks) {
    text << " [";
    for (const Parameter& p : block.parameters) {
      text << " " << testing::count_of(p) << (p.trainable ? "x" : " frozen");
      if (p.trainable) text << p.pushes;
    }
    text << " ]";
  }
  text << (random.model.visits.empty() ? " recorded" : " given");
  for (const auto& visit : random.visits) {
    text << (visit.visit.pass == Pass::kForward ? " f" : " b") << visit.visit.block;
  }
  text << " " << name_of(config.weights) << " parameters " << static_cast<int>(config.parameters) << " states "
       << static_cast<int>(config.states) << " clipping " << config.gradient_clipping << " speculative "
       << config.speculative_blocks.value_or(99) << " tile " << config.tile_elements << " hbm "
       << config.hbm_bytes.value_or(0) << " host " << config.host_bytes.value_or(0)
       << (random.leaves_out ? " leaves out" : "") << " threads " << config.threads << " paths "
       << config.nvme_paths.size() << " commit_every ";
  return config.commit_every ? text.str() + std::to_string(*config.commit_every) : text.str() + "unset";
}

struct GivenUp {};  // the caller's own exception

class RandomRun {
 public:
  RandomRun(std::uint64_t seed, bool faults) : random_(seed), faults_(faults), config_(random_.config) {
    for (auto& path : config_.nvme_paths) path = directory_.path() / path;
    resumable_ = !config_.nvme_paths.empty() && config_.commit_every != 0u;
    expected_ = testing::in_hbm(random_, kSteps);
  }

  // The same steps, one after the other, move the same bytes. What is written or read ahead at a step's end counts in
  // one step or in the next.
  void run_calmly() {
    start(OnExisting::kRefuse);
    SCOPED_TRACE(text_of(random_, config_));
    RandomCaller caller{random_, *engine_};
    std::vector<StepReport> reports;
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      reports.push_back(caller.run_step(std::as_bytes(std::span(&step, 1))));
      if (step > 1) {
        EXPECT_EQ(reports.back().unplanned_visits, 0u);
      }
    }
    expect_exported();
    const bool same_commits = config_.nvme_paths.empty() || config_.commit_every.value_or(3) < 2;
    if (config_.gradient_clipping > 0 && config_.speculative_blocks != 0u)
      return;  // which steps guess is its own affair
    // A step after a skipped one has no update to make.
    if (std::ranges::any_of(std::span(reports).last(3), &StepReport::skipped)) return;
    const StepReport &one = reports[kSteps - 2], &next = reports[kSteps - 1];
    EXPECT_EQ(one.h2d_bytes, next.h2d_bytes);
    EXPECT_EQ(one.visit_hits, next.visit_hits);
    EXPECT_EQ(one.tile_bytes, next.tile_bytes);
    EXPECT_EQ(one.tile_hit_bytes, next.tile_hit_bytes);
    if (same_commits && config_.gradient_clipping > 0) {
      EXPECT_EQ(one.nvme_write_bytes, next.nvme_write_bytes);
      if (!config_.knobs.pipeline_read.value_or(true)) {
        EXPECT_EQ(one.nvme_read_bytes, next.nvme_read_bytes);
      }
    }
    if (same_commits) {
      EXPECT_EQ(one.d2h_bytes, next.d2h_bytes);
    }
  }

  void run() {
    recovering_ = OnExisting::kRefuse;
    for (int turns = 0; !over_ && !::testing::Test::HasFailure(); ++turns) {
      ASSERT_LT(turns, 100) << "no progress";
      // Where commits are rare, each failure, and each new start, takes the run back to its beginning.
      mended_ = turns >= 60;
      try {
        if (recovering_) {
          start(*recovering_);
          recovering_.reset();
        } else {
          engine_->current_step() < kSteps ? turn() : finish();
        }
      } catch (const Error& error) {
        if (!faults_ || error.code() == Code::kInvalidArgument) throw;
        recover(error);
      }
    }
    drive.armed = false;
  }

 private:
  static constexpr std::uint64_t kSteps = 6;
  std::uint64_t below(std::uint64_t end) { return random_.below(end); }
  bool chance(std::uint64_t one_in) { return random_.chance(one_in); }

  void start(OnExisting on_existing) {
    engine_.reset();
    saved_.reset();
    drive.failed = false;
    random_.change_limits(config_);
    if (std::getenv("SPILLWAY_CASE")) std::printf("%s\n", text_of(random_, config_).c_str());
    SCOPED_TRACE(text_of(random_, config_));
    drive.fails_in = faults_ && !mended_ && chance(2) ? static_cast<std::int64_t>(below(600)) : -1;
    drive.armed = faults_ && chance(4);  // from the first request on
    engine_ = Engine::create(config_, random_.model, {.on_existing = on_existing, .poison_released = chance(2)});
    for (Placement tier : {Placement::kHbm, Placement::kHost, Placement::kNvme}) {
      const Ledger& ledger = engine_->ledger();
      const std::uint64_t budget = tier == Placement::kHbm    ? ledger.hbm_budget
                                   : tier == Placement::kHost ? ledger.host_budget
                                                              : ledger.nvme_budget;
      EXPECT_LE(ledger.total(tier), budget);
    }
    if (on_existing == OnExisting::kResume) {
      EXPECT_GE(engine_->current_step(), durable_);
      expect_blob();
    } else {
      std::uint64_t disk = 0;
      for (const auto& path : config_.nvme_paths) disk += TileStore::file_bytes(path);
      EXPECT_EQ(disk, engine_->ledger().total(Placement::kNvme));
      engine_->import_weights(testing::toy_weights());
      imported_ = true;
    }
    drive.armed = faults_;
  }

  void expect_blob() {
    const std::uint64_t step = engine_->current_step();
    const auto blob = engine_->blob();
    if (step == 0) {
      EXPECT_TRUE(blob.empty());
    } else {
      ASSERT_EQ(blob.size(), sizeof step);
      EXPECT_EQ(std::memcmp(blob.data(), &step, sizeof step), 0);
    }
  }

  // A step, and what may come beside it.
  void turn() {
    SCOPED_TRACE(text_of(random_, config_) + " step " + std::to_string(engine_->current_step() + 1));
    if (chance(6)) engine_->flush();
    if (chance(6)) expect_exported();
    if (chance(6)) begin_snapshot();
    if (resumable_ && !mended_ && chance(5)) start(OnExisting::kResume);
    std::size_t pushes = 0;
    for (const auto& visit : random_.visits) pushes += visit.pushed.size() * random_.micro_batches;
    RandomCaller caller{random_, *engine_, below(1000)};
    caller.visits_besides = chance(3);
    caller.seen = [this](std::uint32_t block, std::uint64_t hash) {
      EXPECT_EQ(hash, expected_.visited[engine_->current_step()][block]) << "block " << block;
    };
    if (chance(4)) {
      caller.between = [this, left = below(20)]() mutable {
        if (left-- == 0) engine_->flush();
      };
    }
    if (chance(4)) give_up_in(caller);
    std::uint64_t step = engine_->current_step() + 1;
    const auto blob = std::as_bytes(std::span(&step, 1));
    // In fp16 a step with a NaN is done, and another than what is expected.
    if (pushes > 0 && random_.config.weights != DType::kFloat16 && chance(4)) {
      caller.poison = below(pushes);
      try {
        caller.run_step(blob);
        ADD_FAILURE() << "a NaN went through";
      } catch (const Error& error) {
        if (error.code() != Code::kNonFinite) throw;
      }
      EXPECT_EQ(engine_->current_step(), step - 1);
      caller.poison.reset();
    }
    const StepReport report = caller.run_step(blob);
    EXPECT_EQ(report.step, step);
    EXPECT_EQ(report.gradient_norm, expected_.norms[step - 1]);
    EXPECT_EQ(report.loss_scale, expected_.loss_scales[step - 1]);
    EXPECT_EQ(report.skipped, std::isinf(report.gradient_norm));
    EXPECT_LE(report.durable_step, step);
    EXPECT_GE(report.durable_step, durable_);
    durable_ = report.durable_step;
    expect_snapshot();
  }

  void give_up_in(RandomCaller& caller) {
    const auto between = std::exchange(caller.between, [left = below(random_.visits.size() + 1)]() mutable {
      if (left-- == 0) throw GivenUp();
    });
    try {
      caller.run_step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const GivenUp&) {
    }
    engine_->discard_step();
    caller.between = between;
  }

  void begin_snapshot() {
    engine_->begin_save(snapshot_, {.replace = true});
    saved_ = engine_->current_step();
  }

  // The one that was begun, written while a step was made. Another run goes on from it.
  void expect_snapshot() {
    if (!saved_) return;
    const std::uint64_t step = *std::exchange(saved_, std::nullopt);
    engine_->finish_save();
    const auto other = Engine::create(testing::config_in_hbm(random_), random_.model, {.snapshot = snapshot_});
    EXPECT_EQ(other->current_step(), step);
    EXPECT_TRUE(testing::exported(*other) == expected_.weights[step]);
    RandomCaller caller{random_, *other};
    EXPECT_EQ(caller.run_step().gradient_norm, expected_.norms[step]);
    EXPECT_TRUE(testing::exported(*other) == expected_.weights[step + 1]);
  }

  void expect_exported() {
    const std::uint64_t step = engine_->current_step();
    EXPECT_TRUE(testing::exported(*engine_) == expected_.weights[step]) << "exported after step " << step;
  }

  // After a failure nothing but a new engine, which goes on from the last commit.
  void recover(const Error& error) {
    const std::string text = error.what();
    EXPECT_TRUE(drive.failed || error.code() == Code::kCorrupt) << text;
    EXPECT_NE(text.find("; "), std::string::npos) << text;
    if (engine_) {
      try {
        engine_->step();
        ADD_FAILURE() << "a step after " << text;
      } catch (const Error& again) {
        EXPECT_EQ(again.code(), Code::kIo) << "not refused for the failure: " << again.what();
      }
    }
    if (resumable_ && imported_) return recovering_ = OnExisting::kResume, void();
    engine_.reset();
    for (const auto& path : config_.nvme_paths) std::filesystem::remove_all(path);
    durable_ = 0;
    recovering_ = OnExisting::kReplace;
  }

  void finish() {
    SCOPED_TRACE(text_of(random_, config_));
    drive.armed = false;
    expect_exported();
    if (resumable_) {
      engine_->flush();
      start(OnExisting::kResume);
      EXPECT_EQ(engine_->current_step(), kSteps);
      drive.armed = false;
      expect_exported();
    }
    over_ = true;
  }

  TempStore directory_;
  RandomCase random_;
  const bool faults_;
  bool mended_ = false;  // the drive fails no more, and nobody stops the run
  Config config_;
  bool resumable_ = false, imported_ = false, over_ = false;
  std::optional<OnExisting> recovering_;  // a new engine is due
  const std::filesystem::path snapshot_ = directory_.path() / "snapshot";
  std::optional<std::uint64_t> saved_;  // the step of the snapshot that was begun
  testing::Expected expected_;
  std::unique_ptr<Engine> engine_;
  std::uint64_t durable_ = 0;
};

void run_case(std::uint64_t seed, bool faults, void (RandomRun::*run)() = &RandomRun::run) {
  SCOPED_TRACE("SPILLWAY_CASE=" + std::to_string(seed));
  const Watchdog watchdog(seed);
  drive.seed = faults ? seed | 1 : 0;
  drive.error = seed % 2 ? EIO : ENOSPC;
  drive.rots = seed % 3 == 0;
  drive.failed = false;
  drive.rates = {.short_transfer = 0.05, .eintr = 0.02, .eagain = 0.02, .delay = 0.1};
  try {
    RandomRun random(seed, faults);
    (random.*run)();
  } catch (const Error& error) {
    // A caller may come back to a block in more ways than a plan with little memory can follow.
    if (std::string(error.what()).find("go to nvme as a whole") == std::string::npos) ADD_FAILURE() << error.what();
  }
  drive.seed = 0;
}

void run_cases(bool faults, void (RandomRun::*run)() = &RandomRun::run) {
  auto generator = seeded_generator();
  const char *one = std::getenv("SPILLWAY_CASE"), *wanted = std::getenv("SPILLWAY_CASES");
  const int cases = one ? 1 : wanted ? std::atoi(wanted) : 10;
  for (int c = 0; c < cases && !::testing::Test::HasFailure(); ++c) {
    run_case(one ? std::strtoull(one, nullptr, 10) : generator(), faults, run);
  }
}

TEST(RandomTraining, HasTheSameBitsAsInHbm) { run_cases(false); }
TEST(RandomTraining, MovesTheSameBytesInEveryStep) { run_cases(false, &RandomRun::run_calmly); }
TEST(RandomTraining, GoesOnFromItsLastCommitWhenTheDriveFails) { run_cases(true); }

// A write that was found to have failed while a lease was released: the step was committed with it all the same.
TEST(RandomTraining, AFailureInAReleaseIsNotForgotten) { run_case(3476373931490820738, true); }

}  // namespace
}  // namespace spillway
