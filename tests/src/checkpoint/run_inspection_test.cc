#include "src/checkpoint/run_inspection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "spillway/export.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::map<std::string, std::string> files_of(const std::filesystem::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().filename()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

class RunInspection : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  RunInspection() { train(OnExisting::kRefuse, 2); }

  void train(OnExisting on_existing, std::uint64_t steps, const std::function<void(RankRun&)>& then = {}) {
    run_ranks(GetParam(), [&](Communicator& communicator) {
      RankRun run(case_, &communicator, store_.path(), on_existing);
      run.until(steps);
      if (then) then(run);
    });
  }
  std::filesystem::path of_rank(std::uint32_t rank) const { return store_.path() / ("rank" + std::to_string(rank)); }
  RunPaths paths() const { return find_ranks({store_.path()}); }
  std::vector<RankCommits> commits() const { return OpenRun(paths(), FoundStores::Purpose::kInspect).commits(); }
  // Rank 1's store as it was at step 2, the others at step 3.
  void leave_one_behind() {
    std::filesystem::copy(of_rank(1), other_ / "aside");
    train(OnExisting::kResume, 3);
    std::filesystem::remove_all(of_rank(1));
    std::filesystem::rename(other_ / "aside", of_rank(1));
  }
  // A byte of the committed step, or of the one before.
  void damage(std::uint32_t rank, bool committed) {
    std::uint64_t offset = 0;
    {
      const OpenRun run(paths(), FoundStores::Purpose::kInspect);
      const OpenStore& store = *run.ranks[rank];
      offset = store.layout.tiles[0].extent[store.choice.manifest->tiles[0].slot ^ (committed ? 0u : 1u)][0].offset;
    }
    std::fstream file(of_rank(rank) / kStoreFileName, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(byte ^ 1));
  }

  const RanksCase case_{.layout = layout_case("nvme")};
  TempStore store_;
  const TempDirectory other_;
};
INSTANTIATE_TEST_SUITE_P(, RunInspection, ::testing::Values(2u, 4u));

TEST_P(RunInspection, TheStoresOfAllRanksAreFoundAndShown) {
  ASSERT_EQ(paths().size(), GetParam());
  EXPECT_EQ(paths()[1].front(), of_rank(1));
  const RunInfo info = inspect_run(paths());
  ASSERT_EQ(info.ranks.size(), GetParam());
  EXPECT_EQ(info.step, 2u);
  EXPECT_EQ(info.ranks[1].rank, 1u);
  EXPECT_EQ(info.ranks[1].run, info.ranks[0].run);
  EXPECT_THAT(info.steps, HasSubstr("have steps 2 and 1"));
  EXPECT_TRUE(find_ranks({other_.path()}).empty());
}

TEST_P(RunInspection, AModelOfAllRanksIsThatOfTheEngines) {
  const RunPaths all = paths();
  train(OnExisting::kResume, 3, [&](RankRun& run) {
    export_model(*run.engine, run.model, other_ / ("engine" + std::to_string(run.rank)), {});
  });
  EXPECT_EQ(export_run(all, other_ / "stores", {}).step, 3u);
  EXPECT_TRUE(files_of(other_ / "stores") == files_of(other_ / "engine0"));
}

TEST_P(RunInspection, AStepCountsWhenAllHaveIt) {
  train(OnExisting::kResume, 2, [&](RankRun& run) {
    export_model(*run.engine, run.model, other_ / ("engine" + std::to_string(run.rank)), {});
  });
  leave_one_behind();
  const RunInfo info = inspect_run(paths());
  EXPECT_EQ(info.step, 2u);
  EXPECT_THAT(info.steps, HasSubstr("rank 0 has steps 3 and 2, rank 1 has steps 2 and 1"));
  EXPECT_EQ(verify_run(paths()).step, 2u);
  EXPECT_EQ(export_run(paths(), other_ / "stores", {}).step, 2u);
  EXPECT_TRUE(files_of(other_ / "stores") == files_of(other_ / "engine0"));
}

TEST_P(RunInspection, EveryByteOfAllRanksIsVerified) {
  std::uint64_t progress = 0, of = 0, last = 0;
  const CheckedStore whole = verify_run(paths(), {.progress = [&](std::uint64_t done, std::uint64_t bytes) {
                                          EXPECT_GE(done, last);
                                          last = progress = done;
                                          of = bytes;
                                        }});
  EXPECT_EQ(whole.bad_extents, 0u);
  EXPECT_EQ(whole.bytes, of);
  EXPECT_EQ(progress, of);
  damage(1, true);
  std::vector<BadExtent> bad;
  EXPECT_EQ(verify_run(paths(), {.on_bad = [&](const BadExtent& one) { bad.push_back(one); }}).bad_extents, 1u);
  ASSERT_EQ(bad.size(), 1u);
  EXPECT_EQ(bad[0].file, of_rank(1) / kStoreFileName);
}

TEST_P(RunInspection, AllRanksGoBackTogether) {
  EXPECT_EQ(roll_back_run(paths()), 1u);
  EXPECT_EQ(inspect_run(paths()).step, 1u);
  train(OnExisting::kResume, 0, [&](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 1u); });
  EXPECT_EQ(roll_back_run(paths()), 2u) << "the second one takes the first one back";
  EXPECT_EQ(inspect_run(paths()).step, 2u);
}

TEST_P(RunInspection, WhoIsAheadGoesBackToWhatAllHave) {
  leave_one_behind();
  EXPECT_EQ(roll_back_run(paths()), 2u);
  for (const RankCommits& rank : commits()) EXPECT_EQ(rank.last->step, 2u);
}

TEST_P(RunInspection, NoneGoesBackWhereOneCannot) {
  damage(GetParam() - 1, false);
  const auto before = commits();
  EXPECT_EQ(error_of([&] { roll_back_run(paths()); }).code(), Code::kCorrupt);
  for (std::size_t rank = 0; rank < before.size(); ++rank) EXPECT_EQ(commits()[rank].last, before[rank].last);
}

// The crash comes after the first rank.
TEST_P(RunInspection, ARollBackThatWasCutShortIsFinishedOrTakenBack) {
  {
    OpenRun run(paths(), FoundStores::Purpose::kUse);
    OpenStore& store = *run.ranks[0];
    TileStore::take_older(store.files, store.layout, store.choice, kRollBackStride);
  }
  EXPECT_EQ(inspect_run(paths()).step, 2u);
  EXPECT_EQ(roll_back_run(paths()), 1u);
  EXPECT_EQ(inspect_run(paths()).step, 1u);
  EXPECT_EQ(roll_back_run(paths()), 2u);
}

TEST_P(RunInspection, WhatDoesNotBelongTogetherIsNamed) {
  const RunPaths all = paths();
  const auto missing_of = [&] { return std::string(error_of([&] { inspect_run(paths()); }).what()); };
  std::filesystem::rename(of_rank(1), other_ / "aside");
  EXPECT_THAT(missing_of(), HasSubstr(of_rank(1).string() + ": holds no store: rank 1 of " +
                                      std::to_string(GetParam()) + " has none"));
  std::filesystem::rename(other_ / "aside", of_rank(1));
  EXPECT_THAT(error_of([&] {
                inspect_run({all[1], all[0]});
              }).what(),
              HasSubstr("is the store of rank 1 of " + std::to_string(GetParam()) + ", in the place of rank 0 of 2"));
  EXPECT_EQ(error_of([&] { roll_back_store(all[1]); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(error_of([&] { export_store(all[1], other_ / "never", {}); }).code(), Code::kUnsupported);
  EXPECT_EQ(error_of([] { inspect_run({}); }).code(), Code::kInvalidArgument);
  // Another run's in one rank's place.
  TempStore another;
  run_ranks(GetParam(), [&](Communicator& communicator) { RankRun(case_, &communicator, another.path()); });
  std::filesystem::remove_all(of_rank(1));
  std::filesystem::rename(another.path() / "rank1", of_rank(1));
  EXPECT_THAT(missing_of(), HasSubstr("; rank 1 is not of the run of rank 0, "));
  EXPECT_EQ(error_of([&] { export_run(all, other_ / "never", {}); }).code(), Code::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(other_ / "never"));
}

TEST_P(RunInspection, StoresOfAnOlderRunWithMoreRanksAreNamed) {
  std::filesystem::copy(of_rank(1), store_.path() / "rank9");
  EXPECT_THAT(inspect_run(paths()).others, ElementsAre(store_.path() / "rank9"));
  // One rank's own beside those of several.
  std::filesystem::copy(of_rank(0) / kStoreFileName, store_.path() / kStoreFileName);
  EXPECT_THAT(error_of([&] { paths(); }).what(), HasSubstr("holds a store, and below it are those of"));
}

}  // namespace
}  // namespace spillway::testing
