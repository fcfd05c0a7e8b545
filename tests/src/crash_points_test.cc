// A power cut, or a kill and then a power cut, at any point of a run: the store that is left opens at the last durable
// commit or at the one under way, in full, and goes on with the bits of a run that nothing interrupted.
//
// One run is recorded by the disk below it (tests/aio/simulated_disk.h) and crashed at many points. SPILLWAY_CASES says
// how many runs, of 24 points each (8 where gradients are spilled): SPILLWAY_CASES=450 ./src_crash_points_test is the
// long form, with 10,000 points. SPILLWAY_SEED=random draws other ones, SPILLWAY_CASE=… is one of its runs alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>

#include "kernels/checksum.h"
#include "swap/tile_store.h"
#include "tests/aio/temp_files.h"
#include "tests/kernels/random.h"
#include "tests/src/small_case.h"

namespace spillway {
namespace {

using testing::CapturedLog;
using testing::DiskChange;
using testing::DiskFate;
using testing::DiskImage;
using testing::DiskLog;
using testing::DiskOp;
using testing::SimulatedDisk;
using testing::SmallCase;
using testing::Uninterrupted;

// Where in a run a crash comes.
enum Phase { kCreate, kImport, kName, kStep, kDataSync, kBetween, kRecord, kRecordSync, kFlush, kClose, kPhases };
constexpr const char* kPhaseNames[kPhases] = {
    "create", "import", "name", "step", "data sync", "before the record", "record", "record sync", "flush", "close"};

struct Recorded {
  struct Record {
    DiskChange change;
    Manifest manifest;
  };
  struct Range {
    std::size_t begin, end;
    Phase phase;
  };

  Recorded(const SmallCase& small, DiskLog recorded, std::vector<Range> marked, std::optional<std::uint64_t> step)
      : log(std::move(recorded)), ranges(std::move(marked)), base_step(step) {
    for (const DiskChange& change : log.changes) {
      if (auto manifest = testing::manifest_in(change, small.plan)) records.push_back({change, std::move(*manifest)});
    }
  }

  // Every position of the run from `from` on, by phase.
  std::vector<std::vector<std::size_t>> positions_by_phase() const;

  DiskLog log;
  std::size_t from = 0;
  std::vector<Record> records;
  std::vector<Range> ranges;
  std::optional<std::uint64_t> base_step;  // of the store that the log's base holds
};

std::vector<std::vector<std::size_t>> Recorded::positions_by_phase() const {
  std::vector<const DiskChange*> events(log.positions, nullptr);
  for (const DiskChange& change : log.changes) {
    events[change.begun] = &change;
    if (change.ended < log.positions) events[change.ended] = &change;
  }
  const auto is_record = [this](const DiskChange& change) {
    return std::ranges::any_of(records, [&](const Record& record) { return record.change.begun == change.begun; });
  };
  std::vector<std::vector<std::size_t>> by_phase(kPhases);
  int records_open = 0, syncs_open = 0;
  const auto last_name = std::ranges::find_if(log.changes.rbegin(), log.changes.rend(),
                                              [](const DiskChange& change) { return change.op == DiskOp::kRename; });
  // Of the store that this run makes; one that goes on has a name from the start.
  const std::size_t named = last_name == log.changes.rend() ? 0 : last_name->ended;
  bool made = named == 0, committed = made, unsynced_record = false;
  for (std::size_t at = 0; at <= log.positions; ++at) {
    if (at > 0 && events[at - 1]) {
      const DiskChange& change = *events[at - 1];
      const bool ends = change.ended == at - 1;
      if (is_record(change)) {
        records_open += ends ? -1 : 1;
        unsynced_record |= ends;
      }
      if (change.op == DiskOp::kSync) {
        syncs_open += ends ? -1 : 1;
        committed |= ends && unsynced_record;
        unsynced_record &= !ends;
        made |= ends;
      }
    }
    const DiskChange* next = at < log.positions ? events[at] : nullptr;
    const auto range = std::ranges::find_if(ranges, [&](const Range& r) { return r.begin <= at && at <= r.end; });
    Phase phase = !committed ? kImport : at <= named ? kName : kStep;
    if (next && next->begun == at && is_record(*next)) phase = kBetween;
    if (syncs_open > 0) phase = unsynced_record ? kRecordSync : kDataSync;
    if (records_open > 0) phase = kRecord;
    if (range != ranges.end()) phase = range->phase;
    if (!made) phase = kCreate;
    if (at >= from) by_phase[phase].push_back(at);
  }
  return by_phase;
}

// What a crash may have left.
struct Survivor {
  bool whole = true;  // every path has its file, and they belong together
  std::optional<std::uint64_t> durable, under_way;
};

Survivor survivor_of(const SmallCase& small, const Recorded& run, std::size_t at, const DiskImage& image) {
  Survivor survivor;
  std::set<std::uint32_t> files;
  std::size_t old = 0;
  // Once the last path's file has its name the others are given theirs by who opens them.
  const auto last = image.entries.find((small.config.nvme_paths.back() / kStoreFileName).string());
  const bool naming = last != image.entries.end() && !run.log.base.contents.contains(last->second);
  for (const auto& path : small.config.nvme_paths) {
    auto found = image.entries.find(StoreFiles::temporary_name(path).string());
    if (!naming || found == image.entries.end()) found = image.entries.find((path / kStoreFileName).string());
    survivor.whole &= found != image.entries.end();
    if (found == image.entries.end()) continue;
    files.insert(found->second);
    old += run.log.base.contents.contains(found->second);
  }
  survivor.whole &= old == 0 || old == files.size();
  if (survivor.whole && old > 0) survivor.durable = survivor.under_way = run.base_step;
  const auto named = std::ranges::count_if(run.log.changes, [&](const DiskChange& change) {
    return change.op == DiskOp::kRename && run.log.durable(change, at);
  });
  const bool all_named = named == std::ssize(small.config.nvme_paths);
  for (const Recorded::Record& record : run.records) {
    if (record.change.begun >= at) continue;
    const bool had_name = all_named || run.log.base.contents.contains(record.change.file);
    const bool durable = had_name && run.log.durable(record.change, at),
               there = survivor.whole && files.contains(record.change.file);
    EXPECT_TRUE(there || !durable) << "the store of step " << record.manifest.step << " is gone";
    if (!there) continue;
    survivor.under_way = std::max(survivor.under_way.value_or(0), record.manifest.step);
    if (durable) survivor.durable = std::max(survivor.durable.value_or(0), record.manifest.step);
  }
  return survivor;
}

std::uint64_t checksum_on_disk(const TileStore& store, const Extent& extent) {
  AlignedBuffer bytes(extent.bytes);
  store.files().read_at(extent.offset, bytes.bytes());
  std::vector<std::uint64_t> granules;
  for (std::uint64_t at = 0; at < extent.bytes; at += kGranuleBytes) {
    granules.push_back(granule_checksum(bytes.bytes().subspan(at, std::min(kGranuleBytes, extent.bytes - at))));
  }
  return extent_checksum(granules);
}

class CrashCase {
 public:
  explicit CrashCase(std::uint64_t seed)
      : small_(seed), root_(testing::quick_directory()), expected_(small_, root_ / "expected") {
    EXPECT_EQ(expected_.commits.size(), SmallCase::kSteps + 1) << small_.text();
    EXPECT_EQ(small_.plan.spill_bytes > 0, small_.spilled) << small_.text();
  }

  const SmallCase& small() const { return small_; }

  // From nothing, or over an old store, to the last step and the engine's end.
  Recorded record() {
    DiskLog before;
    std::optional<std::uint64_t> old_step;
    if (below(4) == 0 && small_.config.commit_every != 0u) {
      const Recorded old = train(root_ / "run", {}, std::nullopt, OnExisting::kRefuse, 2);
      before = {.base = image_at(old.log, old.log.positions, testing::everything_stored()),
                .changes = {},
                .next_file = old.log.next_file};
      old_step = 2;
    }
    return train(root_ / "run", before, old_step, old_step ? OnExisting::kReplace : OnExisting::kRefuse,
                 SmallCase::kSteps);
  }

  // Goes on from a disk that was left, and records that after what its log has.
  Recorded record_more(const DiskLog& left, std::optional<std::uint64_t> base_step) {
    image_at(left, left.positions, testing::everything_stored()).store_in(root_ / "more");
    Recorded more = train(root_ / "more", left, base_step, OnExisting::kResume, SmallCase::kSteps);
    more.from = left.positions;
    return more;
  }

  // The step from which the store goes on; nothing: it is refused, and a new run begins.
  std::optional<std::uint64_t> crash(const Recorded& run, std::size_t at, const DiskFate& fate) {
    const DiskImage image = image_at(run.log, at, fate);
    const Survivor survivor = survivor_of(small_, run, at, image);
    const std::filesystem::path root = root_ / "crashed";
    image.store_in(root);
    SimulatedDisk disk(root);  // a well one; its syncs cost nothing
    disk.misbehave({});
    const Config config = small_.config_below(root);
    if (!check_store(config, survivor)) {
      start_over(config, survivor);
      return std::nullopt;
    }
    auto engine = Engine::create(config, small_.model, {.on_existing = OnExisting::kResume});
    const std::uint64_t step = engine->current_step();
    EXPECT_TRUE(testing::is_blob_of(small_, step, engine->blob()));
    go_on(*engine, SmallCase::kSteps);
    EXPECT_TRUE(testing::exported(*engine) == expected_.weights[SmallCase::kSteps]);
    return step;
  }

  std::uint64_t below(std::uint64_t end) { return small_.random() % end; }

 private:
  Recorded train(const std::filesystem::path& root, DiskLog before, std::optional<std::uint64_t> base_step,
                 OnExisting on_existing, std::uint64_t steps) {
    std::filesystem::create_directories(root);
    std::vector<Recorded::Range> ranges;
    const bool at_rest = before.changes.empty();  // a power cut: what is there is durable
    SimulatedDisk disk(root, std::move(before));
    const Config config = small_.config_below(root);
    auto engine = Engine::create(config, small_.model, {.on_existing = on_existing});
    if (on_existing != OnExisting::kResume) {
      engine->import_weights(testing::toy_weights());
    } else if (at_rest) {
      base_step = engine->current_step();
    }
    const std::uint64_t flushed = 1 + below(steps - 1), reopened = below(2 * steps), poisoned = below(2 * steps);
    while (engine->current_step() < steps) {
      const std::uint64_t step = engine->current_step() + 1;
      const bool refuses = config.weights != DType::kFloat16;  // and does not skip the step
      if (step == poisoned && refuses) expect_refused(*engine, step);
      go_on(*engine, step);
      const std::size_t begin = disk.position();
      if (step == flushed || steps < SmallCase::kSteps) engine->flush();
      if (disk.position() > begin) ranges.push_back({begin, disk.position(), kFlush});
      if (step != reopened || config.commit_every != 1u) continue;
      engine.reset();
      engine = Engine::create(config, small_.model, {.on_existing = OnExisting::kResume});
    }
    const std::size_t begin = disk.position();
    engine.reset();
    if (disk.position() > begin) ranges.push_back({begin, disk.position(), kClose});
    return Recorded(small_, disk.log(), std::move(ranges), base_step);
  }

  void expect_refused(Engine& engine, std::uint64_t step) {
    testing::ToyTrainer trainer = trainer_of(small_, engine);
    trainer.poison_step = step;
    EXPECT_THROW(trainer.run_step(), Error);
  }

  void go_on(Engine& engine, std::uint64_t steps) {
    testing::ToyTrainer trainer = trainer_of(small_, engine);
    while (engine.current_step() < steps) {
      const std::uint64_t step = engine.current_step() + 1;
      EXPECT_EQ(trainer.run_step().gradient_norm, expected_.norms[step]) << "step " << step;
    }
  }

  // Opens the store and compares all of its bytes; false: it is refused, as it must or may be.
  bool check_store(const Config& config, const Survivor& survivor) {
    const bool resumable = survivor.whole && config.commit_every != 0u;
    try {
      const auto store = TileStore::open(config.nvme_paths, store_shape(small_.plan));
      const Manifest& found = store->committed();
      EXPECT_TRUE(resumable && survivor.under_way) << "opens at step " << found.step;
      EXPECT_TRUE(found.step == survivor.durable || found.step == survivor.under_way)
          << "opens at step " << found.step << ", durable is " << survivor.durable.value_or(999) << ", under way "
          << survivor.under_way.value_or(999);
      EXPECT_TRUE(testing::is_record_of(small_, found.step, found.blob));
      const Manifest& expected = expected_.commits.at(found.step);
      for (std::uint32_t t = 0; t < found.tiles.size(); ++t) {
        for (std::size_t part = 0; part < kParts; ++part) {
          const Extent& extent = store->readable(t).extent[part];
          if (extent.bytes == 0) continue;
          EXPECT_EQ(found.tiles[t].checksum[part], expected.tiles[t].checksum[part]) << "tile " << t;
          EXPECT_EQ(checksum_on_disk(*store, extent), expected.tiles[t].checksum[part]) << "tile " << t;
        }
      }
      return true;
    } catch (const Error& error) {
      EXPECT_TRUE(testing::is_clear(error)) << error.what();
      EXPECT_FALSE(resumable && survivor.durable) << error.what();
      if (survivor.whole && config.commit_every == 0u) {
        EXPECT_EQ(error.code(), Code::kUnsupported) << error.what();
        EXPECT_NE(error.parts().happened.find("commit_every 0"), std::string::npos) << error.what();
      }
      return false;
    }
  }

  // Nothing has to be cleaned away: a new run begins, and needs no leave to where no step was committed.
  void start_over(const Config& config, const Survivor& survivor) {
    std::unique_ptr<Engine> engine;
    try {
      engine = Engine::create(config, small_.model);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kExists) << error.what();
      EXPECT_TRUE(!survivor.whole || config.commit_every == 0u) << error.what();
      engine = Engine::create(config, small_.model, {.on_existing = OnExisting::kReplace});
    }
    engine->import_weights(testing::toy_weights());
    go_on(*engine, 1);
    EXPECT_TRUE(testing::exported(*engine) == expected_.weights[1]);
  }

  SmallCase small_;
  const TempDirectory root_;
  Uninterrupted expected_;
};

struct Count {
  std::size_t phases[kPhases] = {}, points = 0, went_on = 0, spilled = 0;
};

void crash_at_every_phase(CrashCase& one, const Recorded& run, std::size_t points, Count& count) {
  const auto by_phase = run.positions_by_phase();
  for (std::size_t point = 0, turn = one.below(kPhases); point < points && !::testing::Test::HasFailure(); ++turn) {
    const auto& positions = by_phase[turn % kPhases];
    if (positions.empty()) continue;
    const std::size_t at = positions[one.below(positions.size())];
    const std::uint64_t fate = one.below(UINT64_MAX);
    SCOPED_TRACE("power cut at " + std::to_string(at) + " of " + std::to_string(run.log.positions) + ", in " +
                 kPhaseNames[turn % kPhases] + ", fate " + std::to_string(fate));
    count.went_on += one.crash(run, at, testing::seeded_fate(fate)).has_value();
    ++count.phases[turn % kPhases];
    ++count.points;
    count.spilled += one.small().spilled;
    ++point;
  }
}

// Some crashes of a run, some of one that goes on after a power cut, some of one that goes on after a kill.
void crash_case(std::uint64_t seed, Count& count) {
  CrashCase one(seed);
  SCOPED_TRACE(one.small().text());
  const Recorded run = one.record();
  if (::testing::Test::HasFailure()) return;
  const std::size_t points = one.small().spilled ? 8 : 24;
  crash_at_every_phase(one, run, points / 2, count);
  if (one.small().config.commit_every == 0u) return crash_at_every_phase(one, run, points / 2, count);
  for (const bool kill : {false, true}) {
    std::size_t at = 0;
    DiskLog left;
    Survivor survivor;
    do {  // until it leaves a store to go on from
      const auto positions = run.positions_by_phase()[one.below(kPhases)];
      if (positions.empty()) continue;
      at = positions[one.below(positions.size())];
      const std::uint64_t fate = one.below(UINT64_MAX);
      left = killed_at(run.log, at, fate);
      if (!kill) {
        left = {
            .base = image_at(run.log, at, testing::seeded_fate(fate)), .changes = {}, .next_file = run.log.next_file};
      }
      const DiskImage image = image_at(left, left.positions, testing::everything_stored());
      survivor = kill ? survivor_of(one.small(), Recorded(one.small(), left, {}, run.base_step), left.positions, image)
                      : survivor_of(one.small(), run, at, image);
    } while (!survivor.durable);
    SCOPED_TRACE((kill ? "goes on after a kill at " : "goes on after a power cut at ") + std::to_string(at));
    crash_at_every_phase(one, one.record_more(left, run.base_step), points / 4, count);
  }
}

TEST(CrashPoints, EveryRecoveryIsACommitInFullAndGoesOnWithTheSameBits) {
  auto generator = seeded_generator();
  const char *one = std::getenv("SPILLWAY_CASE"), *wanted = std::getenv("SPILLWAY_CASES");
  const std::uint64_t cases = one ? 1 : wanted ? std::strtoull(wanted, nullptr, 10) : 4;
  const std::uint64_t first = one ? std::strtoull(one, nullptr, 10) : generator() >> 8;
  Count count;
  CapturedLog quiet;
  for (std::uint64_t c = 0; c < cases && !HasFailure(); ++c) crash_case(first + c, count);
  std::printf("%zu crash points, %zu went on, %zu with spilled gradients;", count.points, count.went_on, count.spilled);
  for (int phase = 0; phase < kPhases; ++phase) std::printf(" %s %zu", kPhaseNames[phase], count.phases[phase]);
  std::printf("\n");
  for (int phase = 0; phase < kPhases && cases >= 3; ++phase) EXPECT_GT(count.phases[phase], 0u) << kPhaseNames[phase];
}

constexpr std::uint64_t kPlainCase = 4;  // a commit at every step

TEST(CrashPoints, ATornRecordFallsBackToItsCopyThenToTheOlderOne) {
  CrashCase one(kPlainCase);
  SCOPED_TRACE(one.small().text());
  const Recorded run = [&] {
    const CapturedLog quiet;
    return one.record();
  }();
  ASSERT_GE(run.records.size(), 2u);
  const Recorded::Record* const copies[] = {&run.records[run.records.size() - 2], &run.records.back()};
  ASSERT_EQ(copies[0]->manifest.step, SmallCase::kSteps);
  ASSERT_EQ(copies[1]->manifest.step, SmallCase::kSteps);
  const std::size_t at = std::max(copies[0]->change.begun, copies[1]->change.begun) + 1;
  enum Stored { kWhole, kTorn, kLost };
  for (const Stored first : {kWhole, kTorn, kLost}) {
    for (const Stored second : {kWhole, kTorn, kLost}) {
      SCOPED_TRACE("copies " + std::to_string(first) + " and " + std::to_string(second));
      DiskFate fate = testing::everything_stored();
      fate.stored = [&](const DiskChange& change, std::uint64_t sector) {
        const Stored of = change.begun == copies[0]->change.begun   ? first
                          : change.begun == copies[1]->change.begun ? second
                                                                    : kWhole;
        return of == kWhole || (of == kTorn && sector % 2 == 0);
      };
      const std::uint64_t step = first == kWhole || second == kWhole ? SmallCase::kSteps : SmallCase::kSteps - 1;
      const CapturedLog log;
      EXPECT_EQ(one.crash(run, at, fate), step);
      // Looked at twice: by the test, and by the engine that goes on. A lost copy is an intact older record.
      const std::size_t said = first == kTorn && second == kTorn ? 2 : 0;
      EXPECT_EQ(log.count("going back to step " + std::to_string(step)), said) << log.all();
    }
  }
}

// A kill leaves a record that nobody has synced. The run that goes on from it writes the slots of the record before,
// which must not be needed any more.
TEST(CrashPoints, ARunThatGoesOnBehindAKillMakesItsRecordDurableFirst) {
  const CapturedLog quiet;
  CrashCase one(kPlainCase);
  SCOPED_TRACE(one.small().text());
  const Recorded run = one.record();
  const std::size_t killed = run.positions_by_phase()[kRecordSync].back();
  const Recorded more = one.record_more(killed_at(run.log, killed, 0), std::nullopt);
  DiskFate fate = testing::everything_stored();
  fate.stored = [&](const DiskChange& change, std::uint64_t) {
    return change.begun >= more.from ||
           std::ranges::none_of(more.records, [&](const auto& r) { return r.change.begun == change.begun; });
  };
  for (std::size_t at = more.from; at <= more.log.positions; at += 5) {
    SCOPED_TRACE("power cut at " + std::to_string(at) + " of " + std::to_string(more.log.positions));
    one.crash(more, at, fate);
  }
}

// A run of kPlainCase that has ended, as a disk at rest, and where the copies of its older record lie.
struct AtRest {
  AtRest() : small(kPlainCase), run(CrashCase(kPlainCase).record()), image(left()) {}

  DiskLog log() const { return {.base = image, .changes = {}, .next_file = run.log.next_file}; }
  DiskImage left() const { return image_at(run.log, run.log.positions, testing::everything_stored()); }
  // The first or second copy of the record of the step before the last.
  const DiskChange& older(std::size_t copy) const { return run.records[run.records.size() - 4 + copy].change; }

  SmallCase small;
  Recorded run;
  DiskImage image;
};

// While a copy is written it may be lost, even one that is there already.
TEST(CrashPoints, RollingBackWritesTheDamagedCopyFirst) {
  const CapturedLog quiet;
  for (const std::size_t damaged : {0, 1}) {
    AtRest rest;
    const DiskChange& copy = rest.older(damaged);
    rest.image.contents.at(copy.file)[copy.offset + 40] ^= std::byte{1};
    const TempDirectory root(testing::quick_directory());
    rest.image.store_in(root / "run");
    const SimulatedDisk disk(root / "run", rest.log());
    const auto paths = rest.small.config_below(root / "run").nvme_paths;
    EXPECT_EQ(TileStore::roll_back(paths, store_shape(rest.small.plan), {}), SmallCase::kSteps - 1);
    const DiskLog log = disk.log();
    ASSERT_EQ(log.changes.size(), 4u);  // a sync after each
    EXPECT_EQ(log.changes[0].offset, copy.offset);
    EXPECT_TRUE(log.durable(log.changes[0], log.changes[2].begun));
    EXPECT_EQ(log.changes[2].offset, rest.older(1 - damaged).offset);
  }
}

// The page cache may hold a record that the drive has not, and calls it written: its sync had failed.
TEST(CrashPoints, WithoutDirectIoWhatIsGoneOnFromIsWrittenOnceMore) {
  const CapturedLog quiet;
  const AtRest rest;
  for (const bool direct : {true, false}) {
    const TempDirectory root(testing::quick_directory());
    rest.image.store_in(root / "run");
    SimulatedDisk disk(root / "run", rest.log());
    if (!direct) disk.refuse_direct();
    const auto paths = rest.small.config_below(root / "run").nvme_paths;
    EXPECT_EQ(TileStore::open(paths, store_shape(rest.small.plan))->committed().step, SmallCase::kSteps);
    const Recorded opened(rest.small, disk.log(), {}, std::nullopt);
    EXPECT_EQ(opened.records.size(), direct ? 0u : 2u);
    for (const Recorded::Record& record : opened.records) {
      EXPECT_EQ(record.manifest.step, SmallCase::kSteps);
      EXPECT_TRUE(opened.log.durable(record.change, opened.log.positions));
    }
  }
}

}  // namespace
}  // namespace spillway
