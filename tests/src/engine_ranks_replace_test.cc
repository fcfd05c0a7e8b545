// A new run in place of one with another number of ranks, which stays until the new one is complete.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"
#include "swap/store_files.h"
#include "swap/tile_store.h"
#include "tests/aio/loop_mount.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

using ::testing::HasSubstr;

class RanksReplace : public ::testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {};
INSTANTIATE_TEST_SUITE_P(, RanksReplace,
                         ::testing::Values(std::tuple(1u, 2u), std::tuple(2u, 1u), std::tuple(2u, 4u),
                                           std::tuple(4u, 2u), std::tuple(2u, 2u)));

TEST_P(RanksReplace, ANewRunTakesThePlaceOfOneWithAnotherNumberOfRanks) {
  const auto [before, after] = GetParam();
  const RanksCase of{.layout = layout_case("nvme"), .paths = 2};
  const TempStore store;
  train_on(before, of, store.path(), OnExisting::kRefuse, 2);
  const auto was = files_below(store.path());
  const std::uint32_t ranks = after;
  on_ranks(ranks, [&](Communicator* communicator) {
    const Error error = error_of([&] { RankRun(of, communicator, store.path(), OnExisting::kRefuse); });
    EXPECT_EQ(error.code(), Code::kExists) << error.what();
  });
  EXPECT_TRUE(files_below(store.path()) == was) << "something was written";
  train_on(after, of, store.path(), OnExisting::kReplace, 1);
  EXPECT_EQ(files_below(store.path()).size(), std::size_t{after} * 2) << "an old store is left";
  train_on(after, of, store.path(), OnExisting::kResume, 0,
           [](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 1u); });
}

// It may yet go on: by a store that waits for its name as well, and where what replaces it ends before it is complete.
TEST(RanksReplaceInPart, ARunWithAnotherNumberOfRanksGoesOn) {
  const RanksCase of{.layout = layout_case("nvme")};
  for (const auto& [before, after] : {std::pair(2u, 4u), std::pair(4u, 2u), std::pair(4u, 1u)}) {
    SCOPED_TRACE(fmt::format("{} by {}", before, after));
    const TempStore store, other;
    train_on(before, of, store.path(), OnExisting::kRefuse, 2, [&](RankRun& run) {
      run.engine->begin_save(other / "snapshot", {});
      run.engine->finish_save();
    });
    std::fstream(other / "snapshot" / "model.safetensors", std::ios::in | std::ios::out).seekp(-8, std::ios::end)
        << "?";
    const auto named = place_of_rank(store.path(), 1, before) / kStoreFileName;
    std::filesystem::rename(named, named.string() + ".new");
    on_ranks(after, [&](Communicator* communicator) {
      const Error error =
          error_of([&] { RankRun(of, communicator, store.path(), OnExisting::kReplace, other / "snapshot"); });
      EXPECT_EQ(error.code(), Code::kCorrupt) << error.what();
    });
    train_on(before, of, store.path(), OnExisting::kResume, 0,
             [](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 2u); });
  }
}

// Two ranks' stores would find their room in those that they replace, and be complete only later.
TEST(RanksReplaceInPart, ARunWithAnotherNumberOfRanksMakesNoRoom) {
  const RanksCase of{.layout = layout_case("nvme")};
  const auto size = [](const std::filesystem::path& run) {
    return std::filesystem::file_size(run / "rank0" / kStoreFileName);
  };
  const TempStore other;
  train_on(2, of, other.path(), OnExisting::kRefuse, 0);
  const LoopMount disk({.kind = "tmpfs", .bytes = 64 * kMiB});
  if (!disk.refusal().empty()) GTEST_SKIP() << disk.refusal();
  const auto directory = disk / "run";
  train_on(4, of, directory, OnExisting::kRefuse, 2);
  const std::uint64_t more = size(other.path()) - size(directory), left = (2 * more + size(other.path())) / 2;
  ASSERT_LT(2 * more, left);
  ASSERT_LT(left, size(other.path()));
  std::ofstream(disk / "rest") << std::string(free_disk_bytes(disk.path()) - left, 'x');
  const auto was = files_below(directory);
  run_ranks(2, [&](Communicator& communicator) {
    const Error error = error_of([&] { RankRun(of, &communicator, directory, OnExisting::kReplace); });
    EXPECT_EQ(error.code(), Code::kDoesNotFit);
    EXPECT_THAT(error.what(), HasSubstr("beside the old ones, which stay until they are complete; "));
    EXPECT_THAT(error.what(), HasSubstr("; free some space, remove the old run, or name another nvme_path"));
  });
  EXPECT_TRUE(files_below(directory) == was);
  std::filesystem::remove(disk / "rest");
  train_on(4, of, directory, OnExisting::kResume, 0, [](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 2u); });
}

}  // namespace
}  // namespace spillway::testing
