// A power cut, or a kill of all ranks, at any point while another number of ranks makes its stores from those of a run,
// and makes two steps. Whatever number of ranks comes next finds the old run whole or the new one, at the same step and
// with the same bits, or at a step after that, which the new run alone has; and so does the one after a power cut in
// the middle of that. The same where a new run takes the place of the old one, and has a step of its own from the
// first.
//
// The disk below all ranks records what they do (tests/aio/simulated_disk.h). SPILLWAY_CASES says at how many points it
// is cut off, SPILLWAY_SEED=random draws other ones.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "spillway/log.h"
#include "spillway/store.h"
#include "tests/aio/simulated_disk.h"
#include "tests/kernels/random.h"
#include "tests/src/ranks_run.h"
#include "tests/src/small_case.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kBefore = 3;

struct Change {
  std::uint32_t before, after, paths;
};

RanksCase small_run(std::uint32_t paths) {
  RanksCase of{.layout = layout_case("nvme"), .paths = paths};
  of.layout.width = 300;
  of.change = [](Config& config) {
    config.io_engine = IoEngineKind::kThreads;
    config.moments = MomentFormat::kInt8;
  };
  return of;
}

void train(std::uint32_t ranks, const RanksCase& of, const std::filesystem::path& directory, OnExisting on_existing,
           const std::function<void(RankRun&)>& then) {
  if (ranks == 1) {
    RankRun run(of, nullptr, directory, on_existing);
    return then(run);
  }
  run_ranks(ranks, [&](Communicator& communicator) {
    RankRun run(of, &communicator, directory, on_existing);
    then(run);
  });
}

std::size_t store_files_in(const std::filesystem::path& root) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) files += entry.is_regular_file();
  return files;
}

// What a run may be found at: its bits there, by step.
using Known = std::map<std::uint64_t, std::vector<std::uint32_t>>;

std::uint64_t expect_known(const Known& known, RankRun& run) {
  const std::uint64_t step = run.engine->current_step();
  const auto bits = exported(*run.engine);
  EXPECT_TRUE(known.contains(step)) << "step " << step;
  if (known.contains(step)) {
    EXPECT_TRUE(bits == known.at(step)) << "of step " << step;
  }
  return step;
}

class RanksResumeCrashes : public ::testing::TestWithParam<Change> {};
INSTANTIATE_TEST_SUITE_P(, RanksResumeCrashes,
                         ::testing::Values(Change{1, 2, 1}, Change{2, 1, 1}, Change{2, 3, 1}, Change{3, 2, 1},
                                           Change{2, 1, 2}, Change{1, 2, 2}, Change{3, 2, 2}),
                         [](const auto& info) {
                           return fmt::format("{}To{}On{}", info.param.before, info.param.after, info.param.paths);
                         });

// `begins`: how the new run does.
void cut_off(const Change& change, OnExisting begins) {
  set_log_sink([](LogLevel, std::string_view) {});
  const auto [before, after, paths] = change;
  const char* const cases = std::getenv("SPILLWAY_CASES");
  const int points = std::max(4, cases ? std::atoi(cases) : 12);  // the first and the fourth are of one run each
  std::mt19937_64 random(test_seed());
  RanksCase of = small_run(paths);
  of.sum_groups = 1;
  of.micro_batches = 6;
  const TempDirectory root = quick_directory();
  std::filesystem::create_directories(root / "run");
  DiskLog old;
  Known known;
  {
    SimulatedDisk disk(root / "run");
    train(before, of, root / "run", OnExisting::kRefuse, [&](RankRun& run) {
      run.until(kBefore);
      const auto bits = exported(*run.engine);
      if (run.rank == 0) known[kBefore] = bits;
    });
    const DiskLog log = disk.log();
    old = {.base = image_at(log, log.positions, everything_stored()), .changes = {}, .next_file = log.next_file};
  }
  DiskLog log;
  std::size_t made = 0;  // position
  {
    SimulatedDisk disk(root / "run", old);
    train(after, of, root / "run", begins, [&](RankRun& run) {
      if (run.rank == 0) made = disk.position();
      const std::uint64_t first = run.engine->current_step();
      for (const std::uint64_t step : {first, first + 1, first + 2}) {
        run.until(step);
        run.engine->flush();
        const auto bits = exported(*run.engine);
        if (run.rank == 0) known[step] = bits;
      }
    });
    log = disk.log();
  }
  int of_old = 0, of_new = 0;
  for (int point = 0; point < points && !::testing::Test::HasFailure(); ++point) {
    // While new stores are written, while names are given and taken, and after that.
    const std::size_t names = made - std::min<std::size_t>(made, 40);
    const std::size_t from[] = {0, names, names, made}, to[] = {names, made, made, log.positions};
    const std::size_t drawn = from[point % 4] + random() % (to[point % 4] - from[point % 4] + 1);
    const std::size_t at = point == 3 ? log.positions : drawn;  // which is of the new run for certain
    const std::uint64_t fate = random();
    SCOPED_TRACE(fmt::format("cut off at {} of {}, fate {}", at, log.positions, fate));
    image_at(log, at, point % 3 == 0 ? everything_stored() : seeded_fate(fate)).store_in(root / "left");
    // Any number of ranks goes on, also one that is neither's; what only looks finds the same.
    const std::uint32_t next[] = {after, before, 4 - std::min(3u, after)};
    const std::uint32_t ranks = next[random() % std::size(next)];
    DiskLog opening;
    std::uint64_t found = 0;
    {
      const DiskImage image = image_at(log, at, point % 3 == 0 ? everything_stored() : seeded_fate(fate));
      SimulatedDisk disk(root / "left", {.base = image, .changes = {}, .next_file = log.next_file});
      train(ranks, of, root / "left", OnExisting::kResume, [&](RankRun& run) {
        const std::uint64_t step = expect_known(known, run);
        if (run.rank == 0) found = step;
      });
      opening = disk.log();
    }
    found == kBefore ? ++of_old : ++of_new;
    EXPECT_EQ(store_files_in(root / "left"), std::size_t{ranks} * paths) << "there is something to clean";
    image_at(opening, random() % (opening.positions + 1), seeded_fate(random())).store_in(root / "again");
    const std::uint32_t others = next[random() % std::size(next)];
    SimulatedDisk disk(root / "again");
    disk.misbehave({});
    train(others, of, root / "again", OnExisting::kResume, [&](RankRun& run) {
      SCOPED_TRACE(fmt::format("cut off once more, by {}, then {}", ranks, others));
      EXPECT_EQ(expect_known(known, run), found);
      run.until(found + 1);
    });
    EXPECT_EQ(store_files_in(root / "again"), std::size_t{others} * paths) << "there is something to clean";
  }
  EXPECT_GT(of_old, 0);
  EXPECT_GT(of_new, 0) << "no cut has found a step that the new run alone has";
}

TEST_P(RanksResumeCrashes, LeaveTheOldRunOrTheNewOneWhole) { cut_off(GetParam(), OnExisting::kResume); }
TEST_P(RanksResumeCrashes, LeaveTheOldRunOrTheOneThatReplacesItWhole) { cut_off(GetParam(), OnExisting::kReplace); }

}  // namespace
}  // namespace spillway::testing
