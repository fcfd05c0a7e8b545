// What a crash leaves of a run on several ranks, as their engines go on from it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/store.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"

namespace spillway::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kSteps = 4;

class RanksRecovery : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  std::filesystem::path of_rank(std::uint32_t rank) const { return store_.path() / ("rank" + std::to_string(rank)); }
  void put_aside(std::uint32_t rank) { std::filesystem::copy(of_rank(rank), aside_ / "store"); }
  // As if it had been killed since, on the way to its next commit.
  void put_back(std::uint32_t rank) {
    std::filesystem::remove_all(of_rank(rank));
    std::filesystem::rename(aside_ / "store", of_rank(rank));
  }
  void train(OnExisting on_existing, std::uint64_t steps, const std::function<void(RankRun&)>& then = {}) {
    run_ranks(GetParam(), [&](Communicator& communicator) {
      RankRun run(case_, &communicator, store_.path(), on_existing);
      run.until(steps);
      if (then) then(run);
    });
  }

  const RanksCase case_{.layout = layout_case("nvme")};
  TempStore store_;

 private:
  const TempDirectory aside_;
};
INSTANTIATE_TEST_SUITE_P(, RanksRecovery, ::testing::Values(2u, 4u));

TEST_P(RanksRecovery, WhoIsAheadGoesBackAndTheBitsAreThoseOfNoCrash) {
  const RanksOutcome whole = train_on_ranks(GetParam(), case_, kSteps);
  train(OnExisting::kRefuse, 2);
  put_aside(1);
  train(OnExisting::kResume, 3);
  put_back(1);
  train(OnExisting::kResume, kSteps, [&](RankRun& run) { EXPECT_TRUE(exported(*run.engine) == whole.bits); });
}

TEST_P(RanksRecovery, AllGoOnFromTheStepThatAllHave) {
  train(OnExisting::kRefuse, 2);
  put_aside(GetParam() - 1);
  train(OnExisting::kResume, 3);
  put_back(GetParam() - 1);
  train(OnExisting::kResume, 0, [&](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 2u); });
}

TEST_P(RanksRecovery, ANewRunTakesThePlaceOfAnOldOne) {
  train(OnExisting::kRefuse, 2);
  train(OnExisting::kReplace, 1);
  train(OnExisting::kResume, 0, [&](RankRun& run) { EXPECT_EQ(run.engine->current_step(), 1u); });
}

TEST_P(RanksRecovery, ARankThatIsMissingIsRefusedOnAll) {
  train(OnExisting::kRefuse, 1);
  std::filesystem::remove_all(of_rank(1));
  run_ranks(GetParam(), [&](Communicator& communicator) {
    const Error error = error_of([&] { RankRun(case_, &communicator, store_.path(), OnExisting::kResume); });
    EXPECT_EQ(error.code(), Code::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr("rank 1: " + of_rank(1).string() + ": holds no store of rank 1"));
  });
}

}  // namespace
}  // namespace spillway::testing
