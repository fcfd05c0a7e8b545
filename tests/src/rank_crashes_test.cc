// A power cut, or a kill of all ranks, at any point of a run of several: a new run takes an old one's place, and
// commits. What is left is opened by all ranks together, at one step of one of the two runs, and once more after a
// power cut in the middle of that.
//
// The disk below all ranks records what they do (tests/aio/simulated_disk.h). SPILLWAY_CASES says at how many points it
// is cut off, SPILLWAY_SEED=random draws other ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <tuple>

#include "tests/aio/simulated_disk.h"
#include "tests/kernels/random.h"
#include "tests/src/rank_directories.h"
#include "tests/src/small_case.h"

namespace spillway::testing {
namespace {

using At = std::pair<std::uint64_t, std::uint64_t>;  // run, step

constexpr std::uint64_t kOld = 1, kNew = 2, kOldSteps = 2, kNewSteps = 2;

struct RecordedRanks {
  DiskLog log;
  std::size_t all_committed = 0, named = 0;  // positions: from here a name may be given; from here all have theirs
  std::vector<std::size_t> durable;          // after the last rank's commit of each step of the new run
};

// What ranks do at the same time comes in an order of its own here, rank after rank, drawn anew each time.
RecordedRanks record(const std::filesystem::path& root, std::uint32_t ranks, bool replaces, std::mt19937_64& random) {
  for (std::uint32_t rank = 0; rank < ranks; ++rank) std::filesystem::create_directories(rank_directory(root, rank));
  DiskLog before;
  if (replaces) {
    SimulatedDisk disk(root);
    make_run(root, ranks, kOld, kOldSteps);
    const DiskLog old = disk.log();
    before = {.base = image_at(old, old.positions, everything_stored()), .changes = {}, .next_file = old.next_file};
  }
  SimulatedDisk disk(root, std::move(before));
  std::vector<std::uint32_t> order;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) order.push_back(rank);
  const auto in_turn = [&](const std::function<void(std::uint32_t)>& work) {
    std::ranges::shuffle(order, random);
    for (const std::uint32_t rank : order) work(rank);
  };
  RecordedRanks recorded;
  std::vector<std::unique_ptr<RankAtWork>> at_work(ranks);
  in_turn([&](std::uint32_t rank) { at_work[rank] = new_store(root, {rank, ranks}, {{kNew, kNew}}); });
  for (std::uint64_t step = 0; step <= kNewSteps; ++step) {
    in_turn([&](std::uint32_t rank) { at_work[rank]->commit(kNew, step); });
    recorded.durable.push_back(disk.position());
    if (step == 0) recorded.all_committed = disk.position();
    in_turn([&](std::uint32_t rank) { at_work[rank]->store().note_all_committed(); });
    if (step == 0) recorded.named = disk.position();
  }
  // Bytes of a step that nobody commits, over those of the step before the last.
  in_turn([&](std::uint32_t rank) { at_work[rank]->write(kNew, kNewSteps + 1); });
  at_work.clear();
  recorded.log = disk.log();
  return recorded;
}

void expect_possible(const RecordedRanks& recorded, std::size_t at, bool replaces, const Reopened& reopened) {
  if (!reopened.at) {
    EXPECT_FALSE(replaces) << reopened.refused;
    EXPECT_LE(at, recorded.named);
    EXPECT_EQ(reopened.code, Code::kNotFound) << reopened.refused;
    return;
  }
  const auto [run, step] = *reopened.at;
  EXPECT_TRUE(at > recorded.all_committed || run == kOld || !replaces) << "not all of the new run had been committed";
  EXPECT_TRUE(at < recorded.named || run == kNew) << "all of the new run had its name";
  if (run == kOld) {
    EXPECT_EQ(step, kOldSteps);
    return;
  }
  const std::uint64_t last = std::ranges::count_if(recorded.durable, [&](std::size_t end) { return end <= at; });
  EXPECT_GE(step + 1, last) << "a step that all had committed is gone";
  EXPECT_LE(step, last) << "a step that none had begun is there";
}

// So many ranks; whether there is an old run.
class RankCrashes : public ::testing::TestWithParam<std::tuple<std::uint32_t, bool>> {};
INSTANTIATE_TEST_SUITE_P(, RankCrashes,
                         ::testing::Values(std::tuple(2u, true), std::tuple(3u, true), std::tuple(2u, false)));

TEST_P(RankCrashes, LeaveOneStepOfOneRun) {
  const char* const cases = std::getenv("SPILLWAY_CASES");
  const int points = cases ? std::atoi(cases) : 40;
  const auto [ranks, replaces] = GetParam();
  std::mt19937_64 random(test_seed());
  const TempDirectory root = quick_directory();
  int finished = 0, undone = 0;
  RecordedRanks recorded;
  for (int point = 0; point < points && !HasFailure(); ++point) {
    if (point % 20 == 0) {
      std::filesystem::remove_all(root / "run");
      recorded = record(root / "run", ranks, replaces, random);
    }
    // Every other one among the names.
    const std::size_t from = point % 2 == 0 ? 0 : recorded.all_committed;
    const std::size_t to = point % 2 == 0 ? recorded.log.positions : recorded.named;
    const std::size_t at = from + random() % (to - from + 1);
    const std::uint64_t fate = random();
    SCOPED_TRACE("cut off at " + std::to_string(at) + " of " + std::to_string(recorded.log.positions) + ", fate " +
                 std::to_string(fate));
    const DiskImage image = image_at(recorded.log, at, point % 3 == 0 ? everything_stored() : seeded_fate(fate));
    image.store_in(root / "left");
    Reopened first;
    DiskLog opening;
    {
      SimulatedDisk disk(root / "left", {.base = image, .changes = {}, .next_file = recorded.log.next_file});
      first = reopen(root / "left", ranks);
      opening = disk.log();
    }
    expect_possible(recorded, at, replaces, first);
    finished += at < recorded.named && first.at && first.at->first == kNew;
    undone += at > recorded.all_committed / 2 && (!first.at || first.at->first == kOld);
    image_at(opening, random() % (opening.positions + 1), seeded_fate(random())).store_in(root / "again");
    SimulatedDisk disk(root / "again");
    disk.misbehave({});
    const Reopened again = reopen(root / "again", ranks);
    EXPECT_EQ(again.at, first.at) << "cut off once more, while it was opened: " << again.refused;
  }
  EXPECT_GT(finished, 0);
  EXPECT_GT(undone, 0);
}

}  // namespace
}  // namespace spillway::testing
