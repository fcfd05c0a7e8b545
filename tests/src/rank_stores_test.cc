#include "src/engine/rank_stores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "tests/error_of.h"
#include "tests/src/comm/forwarding.h"
#include "tests/src/rank_directories.h"
#include "tests/temp_directory.h"

namespace spillway::testing {
namespace {

using ::testing::HasSubstr;
using At = std::pair<std::uint64_t, std::uint64_t>;  // run, step

constexpr std::uint64_t kOld = 1, kNew = 2;

// Every file below a directory, whole.
std::map<std::string, std::string> files_below(const std::filesystem::path& root) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

class RankStoresTest : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  std::filesystem::path of_rank(std::uint32_t rank) const { return rank_directory(root(), rank); }
  const std::filesystem::path& root() const { return root_.path(); }
  std::uint32_t ranks() const { return GetParam(); }

  // What all ranks say that refuse, and nothing is another afterwards.
  Reopened refused() {
    const auto before = files_below(root());
    const Reopened reopened = reopen(root(), ranks());
    EXPECT_FALSE(reopened.at);
    EXPECT_TRUE(files_below(root()) == before) << "something was written";
    return reopened;
  }

  // One rank commits the next step, and is killed before it hears of the others.
  void commit_alone(std::uint32_t rank, std::uint64_t step) {
    RankAtWork at_work(TileStore::open(of_rank(rank), shape_of_rank({rank, ranks()})), {rank, ranks()});
    at_work.commit(kOld, step);
  }

  std::mutex mutex_;

 private:
  const TempDirectory root_;
};
INSTANTIATE_TEST_SUITE_P(, RankStoresTest, ::testing::Values(2u, 3u, 4u));

// As an engine makes them: each on a thread of its own.
void create_run(const std::filesystem::path& root, std::uint32_t ranks, std::uint64_t run, bool replace,
                const std::function<void(RankAtWork&, Agreement&)>& then) {
  run_ranks(ranks, [&](Communicator& communicator) {
    Agreement agreement(&communicator);
    const Rank rank = agreement.rank();
    const StorePaths paths(rank_directory(root, rank.index));
    const auto place = [&] {
      std::filesystem::create_directories(paths.directories[0]);
      return paths;
    };
    const auto existing = replace ? TileStore::Existing::kMakesRoom : TileStore::Existing::kNone;
    RankAtWork at_work(create_together(paths, shape_of_rank(rank), existing, place, {}, agreement), rank);
    agreement.all([&] { at_work.commit(run, 0); });
    then(at_work, agreement);
  });
}

TEST_P(RankStoresTest, NewOnesAreOfOneRunAndGetTheirNamesTogether) {
  std::mutex mutex;
  std::set<std::pair<std::uint64_t, std::uint64_t>> runs;
  create_run(root(), ranks(), kOld, false, [&](RankAtWork& at_work, Agreement& agreement) {
    const auto directory = of_rank(agreement.rank().index);
    EXPECT_FALSE(TileStore::exists(directory));
    EXPECT_TRUE(at_work.store().awaits_others());
    agreement.all([&] { at_work.store().note_all_committed(); });
    EXPECT_TRUE(TileStore::exists(directory));
    EXPECT_FALSE(at_work.store().awaits_others());
    const Superblock& block = at_work.store().files().superblock();
    const std::lock_guard lock(mutex);
    runs.insert({block.run_id[0], block.run_id[1]});
  });
  EXPECT_EQ(runs.size(), 1u);
  EXPECT_NE(*runs.begin(), std::pair(std::uint64_t{0}, std::uint64_t{0}));
  EXPECT_EQ(reopen(root(), ranks()).at, At(kOld, 0));
}

TEST_P(RankStoresTest, WhoeverIsAheadGoesBackToTheStepThatAllHave) {
  make_run(root(), ranks(), kOld, 3);
  commit_alone(ranks() - 1, 4);
  EXPECT_EQ(reopen(root(), ranks()).at, At(kOld, 3));
  // For good: the record is gone, and the run goes on with the same step on all.
  const auto last = TileStore::open(of_rank(ranks() - 1), shape_of_rank({ranks() - 1, ranks()}));
  EXPECT_EQ(last->committed().step, 3u);
  EXPECT_EQ(last->way_back(0).remedy, Remedy::kCheckDriveAndGoBack);
}

TEST_P(RankStoresTest, WhatGoesOnAfterwardsIsCommittedByAll) {
  make_run(root(), ranks(), kOld, 3);
  commit_alone(0, 4);
  const auto go_on = [](RankAtWork& at_work) { at_work.commit(kOld, 4); };
  EXPECT_EQ(reopen(root(), ranks(), go_on).at, At(kOld, 3));
  EXPECT_EQ(reopen(root(), ranks()).at, At(kOld, 4));
}

TEST_P(RankStoresTest, AStepThatIsNotWholeIsNotGoneBackTo) {
  make_run(root(), ranks(), kOld, 3);
  commit_alone(1, 4);
  {
    const auto store = TileStore::open(of_rank(1), shape_of_rank({1, ranks()}));
    const Extent of_before = store->layout().tiles[0].extent[store->committed().tiles[0].slot ^ 1u][0];
    std::fstream file(of_rank(1) / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(of_before.offset));
    file.put('x');
  }
  const Reopened reopened = refused();
  EXPECT_EQ(reopened.code, Code::kCorrupt);
  EXPECT_THAT(reopened.refused, HasSubstr("rank 1: "));
  EXPECT_THAT(reopened.refused, HasSubstr("do not match their checksum"));
}

// The others do nothing meanwhile, and wait only for who says that it goes on.
TEST_P(RankStoresTest, ARankThatReadsAllThatItHasSaysThatItIsAtWork) {
  const auto who_notes = [&] {
    std::vector<bool> notes(ranks());
    run_ranks(ranks(), [&](Communicator& communicator) {
      CountingWork counting(communicator);
      Agreement agreement(&counting);
      const Rank rank = agreement.rank();
      open_together(of_rank(rank.index), shape_of_rank(rank), agreement);
      const std::lock_guard lock(mutex_);
      notes[rank.index] = counting.noted > 0;
    });
    return notes;
  };
  std::vector<bool> none(ranks()), last_alone(ranks());
  last_alone.back() = true;
  make_run(root(), ranks(), kOld, 3);
  EXPECT_EQ(who_notes(), none);
  commit_alone(ranks() - 1, 4);
  EXPECT_EQ(who_notes(), last_alone) << "it goes back";
  commit_alone(ranks() - 1, 4);
  {
    const auto store = TileStore::open(of_rank(ranks() - 1), shape_of_rank({ranks() - 1, ranks()}));
    std::fstream file(of_rank(ranks() - 1) / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
    for (const std::uint64_t copy : store->layout().record_offset[store->committed().sequence % 2]) {
      file.seekp(static_cast<std::streamoff>(copy));
      file.put('x');
    }
  }
  EXPECT_EQ(who_notes(), last_alone) << "its newest record is damaged";
}

TEST_P(RankStoresTest, WithoutAStepInCommonEachIsNamed) {
  make_run(root(), ranks(), kOld, 1);
  std::filesystem::copy(of_rank(0), root() / "earlier");
  make_run(root(), ranks(), kOld, 5);  // of the same run, as only a test can
  std::filesystem::copy(root() / "earlier", of_rank(0),
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  std::filesystem::remove_all(root() / "earlier");
  const Reopened reopened = refused();
  EXPECT_EQ(reopened.code, Code::kCorrupt);
  EXPECT_THAT(reopened.refused, HasSubstr("no step in common: rank 0 has steps 1 and 0, rank"));
  EXPECT_THAT(reopened.refused, HasSubstr("steps 5 and 4"));
}

TEST_P(RankStoresTest, AMissingOneIsRefused) {
  make_run(root(), ranks(), kOld, 1);
  std::filesystem::remove_all(of_rank(1));
  const Reopened reopened = refused();
  EXPECT_EQ(reopened.code, Code::kNotFound);
  EXPECT_THAT(reopened.refused, HasSubstr(of_rank(1).string() + ": holds no store of rank 1, and rank 0 has one"));
  std::filesystem::remove_all(root());
  std::filesystem::create_directories(root());
  EXPECT_THAT(refused().refused, HasSubstr(of_rank(0).string() + ": holds no store"));
}

TEST_P(RankStoresTest, OneOfAnotherRunIsRefused) {
  make_run(root(), ranks(), kOld, 1);
  const TempDirectory other;
  make_run(other.path(), ranks(), kNew, 1);
  std::filesystem::rename(rank_directory(other.path(), ranks() - 1) / kStoreFileName,
                          of_rank(ranks() - 1) / kStoreFileName);
  const Reopened reopened = refused();
  EXPECT_EQ(reopened.code, Code::kInvalidArgument);
  EXPECT_THAT(reopened.refused,
              HasSubstr("is of run 00000000000000020000000000000002, and that of rank 0 of run 0000000000000001"));
}

TEST_P(RankStoresTest, OneInAnotherRanksPlaceIsRefused) {
  make_run(root(), ranks(), kOld, 1);
  std::filesystem::rename(of_rank(0), root() / "first");
  std::filesystem::rename(of_rank(1), of_rank(0));
  std::filesystem::rename(root() / "first", of_rank(1));
  const std::string of = std::to_string(ranks());
  EXPECT_THAT(refused().refused, HasSubstr("is the store of rank 1 of " + of + ", and this is rank 0 of " + of));
}

TEST_P(RankStoresTest, AnotherNumberOfRanksIsRefused) {
  make_run(root(), ranks() + 1, kOld, 1);
  EXPECT_THAT(refused().refused, HasSubstr("is the store of rank 0 of " + std::to_string(ranks() + 1)));
}

TEST_P(RankStoresTest, AnExistingOneOfAnyRankIsNotReplacedUnasked) {
  make_run(root(), ranks(), kOld, 1);
  for (std::uint32_t rank = 0; rank + 1 < ranks(); ++rank) std::filesystem::remove_all(of_rank(rank));
  const auto before = files_below(root());
  run_ranks(ranks(), [&](Communicator& communicator) {
    Agreement agreement(&communicator);
    const StorePaths paths(of_rank(agreement.rank().index));
    const Error error = error_of([&] {
      create_together(
          paths, shape_of_rank(agreement.rank()), TileStore::Existing::kNone, [&] { return paths; }, {}, agreement);
    });
    EXPECT_EQ(error.code(), Code::kExists);
    EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(ranks() - 1) + ": "));
  });
  EXPECT_TRUE(files_below(root()) == before);
}

TEST_P(RankStoresTest, ARankWithoutRoomLeavesAllAsTheyWere) {
  make_run(root(), ranks(), kOld, 1);
  const auto before = files_below(root());
  run_ranks(ranks(), [&](Communicator& communicator) {
    Agreement agreement(&communicator);
    const StorePaths paths(of_rank(agreement.rank().index));
    const auto place = [&]() -> StorePaths {
      if (agreement.rank().index == 1) throw Error(Code::kDoesNotFit, {"the drive", "is full", 0, "make room"});
      return paths;
    };
    const Error error = error_of([&] {
      create_together(paths, shape_of_rank(agreement.rank()), TileStore::Existing::kMakesRoom, place, {}, agreement);
    });
    EXPECT_EQ(error.code(), Code::kDoesNotFit);
    EXPECT_EQ(std::string(error.what()), "rank 1: the drive: is full; make room");
  });
  EXPECT_TRUE(files_below(root()) == before);
  EXPECT_EQ(reopen(root(), ranks()).at, At(kOld, 1));
}

// Rank by rank how far a replacement has come, in every way in which it can be.
TEST_P(RankStoresTest, AReplacementThatIsCutShortIsFinishedOrUndone) {
  enum Stage : unsigned { kMade, kCommitted, kHasItsName, kStages };
  unsigned cases = 1;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) cases *= kStages;
  for (unsigned number = 0; number < cases; ++number) {
    std::vector<unsigned> stage;
    for (unsigned left = number; stage.size() < ranks(); left /= kStages) stage.push_back(left % kStages);
    const bool named = std::ranges::find(stage, kHasItsName) != stage.end();
    if (named && std::ranges::min(stage) < kCommitted) continue;
    if (ranks() == 4 && stage[1] != stage[2]) continue;  // it takes long
    SCOPED_TRACE(number);
    std::filesystem::remove_all(root());
    make_run(root(), ranks(), kOld, 2);
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
      auto at_work = new_store(root(), {rank, ranks()}, {{kNew, kNew}});
      const auto temporary = StoreFiles::temporary_name(of_rank(rank));
      if (stage[rank] == kMade) {  // a killed process removes nothing
        std::filesystem::create_hard_link(temporary, root() / "kept");
        at_work.reset();
        std::filesystem::rename(root() / "kept", temporary);
        continue;
      }
      at_work->commit(kNew, 0);
      if (stage[rank] == kHasItsName) at_work->store().note_all_committed();
    }
    EXPECT_EQ(reopen(root(), ranks()).at, named ? At(kNew, 0) : At(kOld, 2));
    for (std::uint32_t rank = 0; rank < ranks(); ++rank)
      EXPECT_FALSE(std::filesystem::exists(StoreFiles::temporary_name(of_rank(rank)))) << "there is something to clean";
  }
}

// All is there: before the first name of a first run, and where drives had no room for both and lost the old ones.
TEST_P(RankStoresTest, WhatAllHaveCommittedGoesOnWhereThereIsNothingElse) {
  for (const bool some_old : {false, true}) {
    std::filesystem::remove_all(root());
    if (some_old) make_run(root(), ranks(), kOld, 2);
    for (std::uint32_t rank = 0; rank < ranks(); ++rank)
      new_store(root(), {rank, ranks()}, {{kNew, kNew}})->commit(kNew, 0);
    if (some_old) std::filesystem::remove(of_rank(1) / kStoreFileName);
    EXPECT_EQ(reopen(root(), ranks()).at, At(kNew, 0));
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) EXPECT_TRUE(TileStore::exists(of_rank(rank)));
  }
}

// Else the next one would take the place of what waits, and its crash would leave no run at all.
TEST_P(RankStoresTest, AReplacementFinishesTheOneBeforeFirst) {
  make_run(root(), ranks(), kOld, 2);
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    auto at_work = new_store(root(), {rank, ranks()}, {{kNew, kNew}});
    at_work->commit(kNew, 0);
    if (rank == 1) at_work->store().note_all_committed();
  }
  create_run(root(), ranks(), 3, true, [](RankAtWork&, Agreement&) {});  // ends before they have their names
  EXPECT_EQ(reopen(root(), ranks()).at, At(kNew, 0));
  create_run(root(), ranks(), 4, true, [](RankAtWork& at_work, Agreement&) { at_work.store().note_all_committed(); });
  EXPECT_EQ(reopen(root(), ranks()).at, At(4, 0));
}

TEST_P(RankStoresTest, NothingIsWrittenBeforeAllHaveCommitted) {
  auto at_work = new_store(root(), {0, ranks()}, {{kOld, kOld}});
  at_work->commit(kOld, 0);
  EXPECT_DEATH(at_work->store().writable(0), "once all ranks have committed");
  at_work->store().note_all_committed();
  at_work->commit(kOld, 1);
}

// Both take as long as a killed process may take to end, so they do it at the same time.
TEST(RankStoresInUse, OneThatAnotherProcessOrRankHasIsRefusedOnAll) {
  const TempDirectory root, shared;
  make_run(root.path(), 2, kOld, 1);
  const auto other = TileStore::open(rank_directory(root.path(), 1), shape_of_rank({1, 2}));
  std::thread both_in_one([&] {
    run_ranks(2, [&](Communicator& communicator) {
      Agreement agreement(&communicator);
      const StorePaths paths(shared.path());
      const Error error = error_of([&] {
        create_together(
            paths, shape_of_rank(agreement.rank()), TileStore::Existing::kNone, [&] { return paths; }, {}, agreement);
      });
      EXPECT_EQ(error.code(), Code::kBusy) << error.what();
    });
  });
  const Reopened reopened = reopen(root.path(), 2);
  both_in_one.join();
  EXPECT_EQ(reopened.code, Code::kBusy);
  EXPECT_THAT(reopened.refused, HasSubstr("rank 1: " + rank_directory(root.path(), 1).string()));
  EXPECT_TRUE(std::filesystem::is_empty(shared.path()));
}

}  // namespace
}  // namespace spillway::testing
