// A drive that fails at one call, whichever it is, or from there on: every run ends with the right bits or with a clear
// error, and once the drive is well the store goes on from its last commit with the right bits.
//
// SPILLWAY_CASES says how many schedules: SPILLWAY_CASES=10000 ./src_fault_schedules_test is the long form.
// SPILLWAY_CASE=… one schedule alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>

#include "swap/tile_store.h"
#include "tests/aio/temp_files.h"
#include "tests/kernels/random.h"
#include "tests/src/small_case.h"
#include "tests/src/watchdog.h"

namespace spillway {
namespace {

using testing::CapturedLog;
using testing::DiskCall;
using testing::DiskOp;
using testing::Fault;
using testing::SimulatedDisk;
using testing::SmallCase;
using testing::Uninterrupted;

constexpr std::uint64_t kSchedulesOfACase = 10;

enum Target { kAnyRead, kAnyWrite, kRecordRead, kRecordWrite, kSync, kName, kTargets };
constexpr const char* kTargetNames[] = {"read", "write", "record read", "record write", "sync", "name or size"};
enum Effect { kEio, kEnospc, kUnsupportedCall, kShort, kDelay, kFlip, kTorn, kTornLie, kEffects };
constexpr const char* kEffectNames[] = {"EIO", "ENOSPC", "EOPNOTSUPP", "short", "delay", "flip", "torn", "torn lie"};

// Where manifest records lie in the file that holds the start of the space.
struct RecordArea {
  explicit RecordArea(const Plan& plan)
      : bytes(record_bytes(record_form(plan))),
        begin(kExtentAlignment + align_up(plan.identity.description.size() + 1, kExtentAlignment)) {}
  bool holds(const DiskCall& call) const {
    return call.bytes == bytes && call.offset >= begin && call.offset < begin + 4 * bytes;
  }
  std::uint64_t bytes, begin;
};

// One fault, at the nth call of a kind, once or from there on; and short transfers everywhere, when `noisy`.
struct Schedule {
  Schedule(std::uint64_t seed, const Plan& plan) : random(seed), records(plan) {
    constexpr Target kWeighted[] = {kAnyRead,     kAnyRead,     kAnyWrite, kAnyWrite, kRecordRead,
                                    kRecordWrite, kRecordWrite, kSync,     kSync,     kName};
    target = kWeighted[random() % std::size(kWeighted)];
    constexpr std::array<std::uint64_t, kTargets> kOften = {8, 8, 3, 4, 5, 3};  // up to 2^n calls
    nth = random() % (std::uint64_t{1} << random() % (kOften[target] + 1));
    switch (target) {
      case kAnyRead:
      case kRecordRead: effect = pick({kEio, kEio, kShort, kDelay, kFlip, kFlip}); break;
      case kAnyWrite:
      case kRecordWrite: effect = pick({kEio, kEnospc, kShort, kDelay, kFlip, kTorn, kTorn, kTornLie}); break;
      case kSync: effect = pick({kEio, kEio, kEnospc, kDelay}); break;
      default: effect = pick({kEio, kEnospc, kUnsupportedCall}); break;
    }
    lasting = random() % 3 == 0;
    noisy = random() % 2 == 0;
  }

  Fault operator()(const DiskCall& call) {
    const bool transfer = call.op == DiskOp::kRead || call.op == DiskOp::kWrite;
    Fault fault;
    if (meant(call) && (calls++ == nth || (fired > 0 && lasting))) {
      ++fired;
      return make(call);
    }
    if (noisy && transfer && random() % 16 == 0) cut_short(call, fault);
    if (noisy && random() % 64 == 0) fault.delay_seconds = 2e-4;
    return fault;
  }

  std::string text() const {
    return std::string(kEffectNames[effect]) + " at " + kTargetNames[target] + " " + std::to_string(nth) +
           (lasting ? " and on" : "") + (noisy ? ", noisy" : "");
  }

  std::mt19937_64 random;
  RecordArea records;
  Target target;
  Effect effect;
  std::uint64_t nth = 0, calls = 0;
  std::atomic<std::uint64_t> fired = 0;
  bool lasting = false, noisy = false;

 private:
  Effect pick(std::initializer_list<Effect> from) { return from.begin()[random() % from.size()]; }

  bool meant(const DiskCall& call) const {
    switch (target) {
      case kAnyRead: return call.op == DiskOp::kRead;
      case kAnyWrite: return call.op == DiskOp::kWrite;
      case kRecordRead: return call.op == DiskOp::kRead && records.holds(call);
      case kRecordWrite: return call.op == DiskOp::kWrite && records.holds(call);
      case kSync: return call.op == DiskOp::kSync || call.op == DiskOp::kSyncDirectory;
      default:
        return call.op == DiskOp::kOpen || call.op == DiskOp::kResize || call.op == DiskOp::kRename ||
               call.op == DiskOp::kUnlink;
    }
  }

  // A kernel splits a direct transfer between pages at the least.
  void cut_short(const DiskCall& call, Fault& fault) {
    constexpr std::uint64_t kPage = 4096;
    if (call.bytes > kPage) fault.bytes = kPage * (1 + random() % ((call.bytes - 1) / kPage));
  }

  Fault make(const DiskCall& call) {
    Fault fault;
    switch (effect) {
      case kEio: fault.error = EIO; break;
      case kEnospc: fault.error = ENOSPC; break;
      case kUnsupportedCall: fault.error = EOPNOTSUPP; break;
      case kShort: cut_short(call, fault); break;
      case kDelay: fault.delay_seconds = 2e-3; break;
      case kFlip: fault.flipped_bit = random() % (8 * call.bytes); break;
      case kTorn:
      case kTornLie:
        fault.stored_sectors = random() & random();
        if (effect == kTorn) fault.error = EIO;
        break;
      default: break;
    }
    return fault;
  }
};

struct Count {
  std::size_t schedules = 0, fired = 0, errors = 0, recovered = 0, started_over = 0, spilled = 0;
  std::map<std::string, std::size_t> kinds;  // of those that fired
};

// A run with a schedule's drive, from nothing to the last step and once more open; when it fails, with a well drive or
// again with the same one.
class FaultyRun {
 public:
  FaultyRun(const SmallCase& small, const Uninterrupted& expected, const std::filesystem::path& root,
            std::uint64_t seed, Count& count)
      : small_(small),
        expected_(expected),
        random_(seed),
        schedule_(~seed, small.plan),
        made_(root),
        disk_(root),
        config_(small.config_below(root)),
        count_(count) {
    disk_.misbehave([this](const DiskCall& call) { return schedule_(call); });
  }
  ~FaultyRun() {
    engine_.reset();
    count_.errors += errors_;
    ++count_.schedules;
    count_.fired += schedule_.fired > 0;
    count_.spilled += small_.spilled;
    if (schedule_.fired > 0)
      ++count_.kinds[std::string(kEffectNames[schedule_.effect]) + " " + kTargetNames[schedule_.target]];
  }

  std::size_t errors() const { return errors_; }
  bool failed_sync() const { return schedule_.fired > 0 && schedule_.target == kSync && schedule_.effect != kDelay; }

  void run() {
    SCOPED_TRACE(schedule_.text());
    for (int turn = 0; !over_ && !::testing::Test::HasFailure(); ++turn) {
      ASSERT_LT(turn, 50) << "no progress";
      try {
        advance();
      } catch (const Error& error) {
        recover(error);
      }
    }
  }

 private:
  // The root of the disk, made before the disk and gone after it.
  struct Made {
    explicit Made(std::filesystem::path root) : path(std::move(root)) { std::filesystem::create_directories(path); }
    ~Made() { std::filesystem::remove_all(path); }
    std::filesystem::path path;
  };

  std::uint64_t below(std::uint64_t end) { return random_() % end; }
  bool resumable() const { return stored_ && config_.commit_every != 0u; }

  void advance() {
    if (!engine_) return open();
    if (engine_->current_step() < SmallCase::kSteps) return train();
    EXPECT_TRUE(testing::exported(*engine_) == expected_.weights[SmallCase::kSteps]);
    if (resumable()) engine_->flush();
    const bool reopen = resumable() && !reopened_;
    if (reopen) durable_ = SmallCase::kSteps;
    engine_.reset();
    if (!reopen) return void(over_ = true);
    reopened_ = true;
    if (below(2) == 0) lift();
    keep_lies();
  }

  void open() {
    if (!resumable()) {
      start(replacing_ ? OnExisting::kReplace : OnExisting::kRefuse);
      return;
    }
    engine_ = Engine::create(config_, small_.model, {.on_existing = OnExisting::kResume});
    const std::uint64_t step = engine_->current_step();
    if (lifted_ && !rotten_) {
      EXPECT_GE(step, durable_);
    }
    EXPECT_LE(step, last_);
    EXPECT_TRUE(testing::is_blob_of(small_, step, engine_->blob()));
    durable_ = step;
  }

  void start(OnExisting on_existing) {
    durable_ = last_ = 0;
    stored_ = rotten_ = false;
    try {
      engine_ = Engine::create(config_, small_.model, {.on_existing = on_existing});
    } catch (const Error& error) {
      // What a failed attempt has left is to be replaced on purpose.
      replacing_ = error.code() == Code::kExists;
      if (!replacing_ || on_existing == OnExisting::kReplace) throw;
      return;
    }
    engine_->import_weights(testing::toy_weights());
    stored_ = true;
  }

  void train() {
    if (below(6) == 0) engine_->flush();
    testing::ToyTrainer trainer = trainer_of(small_, *engine_);
    if (below(6) == 0) {
      trainer.between = [this, left = below(8)]() mutable {
        if (left-- == 0) engine_->flush();
      };
    }
    const StepReport report = trainer.run_step();
    last_ = std::max(last_, report.step);
    EXPECT_EQ(report.gradient_norm, expected_.norms[report.step]) << "step " << report.step;
    EXPECT_GE(report.durable_step, durable_);
    durable_ = report.durable_step;
    if (below(6) == 0) {
      EXPECT_TRUE(testing::exported(*engine_) == expected_.weights[report.step]);
    }
  }

  // After a failure nothing but a new engine.
  void recover(const Error& error) {
    ++errors_;
    EXPECT_TRUE(testing::is_clear(error)) << error.what();
    EXPECT_TRUE(!lifted_ || rotten_) << "on a drive that is well: " << error.what();
    EXPECT_TRUE(schedule_.fired > 0) << error.what();
    EXPECT_TRUE(error.code() != Code::kInvalidArgument && error.code() != Code::kBusy) << error.what();
    if (engine_) {
      EXPECT_THROW(engine_->step(), Error);
    }
    engine_.reset();
    if (rotten_ && error.code() == Code::kCorrupt && below(2) == 0) {
      ++count_.started_over;
      stored_ = false;
      replacing_ = true;
    }
    if (below(3) > 0) lift();
    keep_lies();
  }

  // The drive is well from now on, and has what it said that it had.
  void lift() {
    if (!lifted_ && schedule_.fired > 0) ++count_.recovered;
    lifted_ = true;
    disk_.misbehave({});
    disk_.repair();
  }

  // What it lied about, and a store is opened on, is lost for good.
  void keep_lies() {
    rotten_ |= disk_.lied();
    disk_.forget_lies();
  }

  const SmallCase& small_;
  const Uninterrupted& expected_;
  std::mt19937_64 random_;
  Schedule schedule_;
  const Made made_;
  SimulatedDisk disk_;
  const Config config_;
  Count& count_;
  std::unique_ptr<Engine> engine_;
  std::size_t errors_ = 0;
  std::uint64_t durable_ = 0, last_ = 0;  // steps: known to survive, done
  bool stored_ = false;                   // there is a commit
  bool replacing_ = false, lifted_ = false, rotten_ = false, reopened_ = false, over_ = false;
};

TEST(FaultSchedules, EndWithTheRightBitsOrAClearErrorAndGoOnFromTheLastCommit) {
  auto generator = seeded_generator();
  const char *one = std::getenv("SPILLWAY_CASE"), *wanted = std::getenv("SPILLWAY_CASES");
  const std::uint64_t schedules = one ? 1 : wanted ? std::strtoull(wanted, nullptr, 10) : 40;
  const std::uint64_t first = one ? std::strtoull(one, nullptr, 10) : generator() >> 8;
  const TempDirectory directory = testing::quick_directory();
  const std::filesystem::path& root = directory.path();
  Count count;
  std::unique_ptr<SmallCase> small;
  std::unique_ptr<Uninterrupted> expected;
  for (std::uint64_t s = first; s < first + schedules && !HasFailure(); ++s) {
    SCOPED_TRACE("SPILLWAY_CASE=" + std::to_string(s));
    const testing::Watchdog watchdog(s);
    const CapturedLog log;
    if (!small || small->seed != s / kSchedulesOfACase) {
      small = std::make_unique<SmallCase>(s / kSchedulesOfACase);
      expected = std::make_unique<Uninterrupted>(*small, root / "expected");
    }
    SCOPED_TRACE(small->text());
    try {
      FaultyRun run(*small, *expected, root / "run", s, count);
      run.run();
      EXPECT_TRUE(!run.failed_sync() || run.errors() > 0 || log.count("sync") > 0) << "a sync failed, unnoticed";
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  std::printf(
      "%zu schedules, %zu fired (%zu with spilled gradients), %zu errors, %zu went on with a well drive, %zu "
      "started over\n",
      count.schedules, count.fired, count.spilled, count.errors, count.recovered, count.started_over);
  for (const auto& [kind, times] : count.kinds) std::printf("  %-24s %zu\n", kind.c_str(), times);
}

// A record of which a copy cannot be read at all is as good as one that is torn.
TEST(FaultSchedules, AnUnreadableRecordFallsBackToItsCopyThenToTheOlderOne) {
  const SmallCase small(4);  // a commit at every step
  const TempDirectory directory = testing::quick_directory();
  const std::filesystem::path& root = directory.path();
  const RecordArea records(small.plan);
  {
    SimulatedDisk disk(root);
    const Config config = small.config_below(root);
    const CapturedLog quiet;
    auto engine = Engine::create(config, small.model);
    engine->import_weights(testing::toy_weights());
    testing::ToyTrainer trainer = trainer_of(small, *engine);
    for (int step = 1; step <= 2; ++step) trainer.run_step();
    engine.reset();
    // Commits 0, 1, 2 went to records 1, 0, 1.
    struct Expectation {
      std::vector<int> unreadable;  // A, A', B, B'
      std::optional<std::uint64_t> step;
    };
    const Expectation expectations[] = {{{2}, 2}, {{3}, 2}, {{0, 1}, 2}, {{0, 2}, 2}, {{2, 3}, 1}, {{0, 1, 2, 3}, {}}};
    for (const Expectation& expectation : expectations) {
      const std::optional<std::uint64_t>& step = expectation.step;
      disk.misbehave([&](const DiskCall& call) {
        Fault fault;
        for (const int copy : expectation.unreadable) {
          const std::uint64_t at = records.begin + static_cast<std::uint64_t>(copy) * records.bytes;
          if (call.op == DiskOp::kRead && call.offset == at) fault.error = EIO;
        }
        return fault;
      });
      try {
        EXPECT_EQ(TileStore::open(config.nvme_paths, store_shape(small.plan))->committed().step, step);
      } catch (const Error& error) {
        EXPECT_FALSE(step.has_value()) << error.what();
        EXPECT_EQ(error.code(), Code::kIo) << error.what();
        EXPECT_EQ(error.parts().errno_value, EIO);
      }
    }
    disk.misbehave({});
    EXPECT_EQ(Engine::create(config, small.model, {.on_existing = OnExisting::kResume})->current_step(), 2u);
  }
}

// Of one path the old store or the new one is left; of several, too, for who opens them gives the rest their names.
TEST(FaultSchedules, AFailureWhileANewStoreGetsItsNameLeavesAStore) {
  SmallCase small(4);
  for (const std::size_t paths : {1, 3}) {
    small.config.nvme_paths.clear();
    for (std::size_t i = 0; i < paths; ++i) small.config.nvme_paths.push_back("disk" + std::to_string(i));
    small.config.nvme_rates.assign(paths, 1);
    for (const DiskOp op : {DiskOp::kRename, DiskOp::kSyncDirectory}) {
      for (std::size_t nth = 0; nth < paths; ++nth) {
        SCOPED_TRACE(std::to_string(paths) + " paths, " + std::to_string(nth));
        const TempDirectory directory = testing::quick_directory();
        SimulatedDisk disk(directory.path());
        const Config config = small.config_below(directory.path());
        const CapturedLog quiet;
        Engine::create(config, small.model)->import_weights(testing::toy_weights());
        auto engine = Engine::create(config, small.model, {.on_existing = OnExisting::kReplace});
        std::atomic<std::size_t> seen = 0;
        disk.misbehave(
            [&](const DiskCall& call) { return call.op == op && seen++ == nth ? Fault{.error = EIO} : Fault{}; });
        EXPECT_THROW(engine->import_weights(testing::toy_weights()), Error);
        engine.reset();
        disk.misbehave({});
        EXPECT_EQ(Engine::create(config, small.model, {.on_existing = OnExisting::kResume})->current_step(), 0u);
      }
    }
  }
}

}  // namespace
}  // namespace spillway
