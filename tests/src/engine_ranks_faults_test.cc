// One of several ranks has a drive that fails: all of them end with an error that says which, and go on later from the
// step that all have, to the bits of a run to which nothing happened.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "tests/aio/simulated_disk.h"
#include "tests/aio/temp_files.h"
#include "tests/error_of.h"
#include "tests/src/ranks_run.h"
#include "tests/src/small_case.h"  // quick_directory()

namespace spillway::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr std::uint64_t kSteps = 4;
constexpr std::uint32_t kRanks = 2;

struct FailingOp {
  const char* name;
  DiskOp op;
  int error;
};

class OneDriveFails : public ::testing::TestWithParam<FailingOp> {};
INSTANTIATE_TEST_SUITE_P(, OneDriveFails,
                         ::testing::Values(FailingOp{"read", DiskOp::kRead, EIO},
                                           FailingOp{"write", DiskOp::kWrite, EIO},
                                           FailingOp{"write_full", DiskOp::kWrite, ENOSPC},
                                           FailingOp{"sync", DiskOp::kSync, EIO}),
                         [](const auto& info) { return info.param.name; });

TEST_P(OneDriveFails, AllRanksEndAndGoOnLater) {
  RanksCase of{.layout = layout_case("nvme")};
  of.change = [](Config& config) { config.io_engine = IoEngineKind::kThreads; };
  const RanksOutcome whole = train_on_ranks(kRanks, of, kSteps);
  for (const std::uint32_t victim : {0u, 1u}) {
    for (const std::uint64_t calls : {0u, 7u, 20u}) {
      SCOPED_TRACE(fmt::format("rank {}, after {} calls", victim, calls));
      const TempDirectory directory = quick_directory();
      SimulatedDisk disk(directory.path());
      std::atomic<std::uint64_t> seen = 0;
      const std::string prefix = fmt::format("rank{}/", victim);
      std::vector<std::string> said(kRanks);
      run_ranks(kRanks, [&](Communicator& communicator) {
        RankRun run(of, &communicator, directory.path());
        run.until(1);
        run.engine->flush();
        if (run.rank == victim) {
          disk.misbehave([&](const DiskCall& call) {
            const bool mine = call.op == GetParam().op && call.name.starts_with(prefix);
            return mine && seen++ >= calls ? Fault{.error = GetParam().error} : Fault{};
          });
        }
        try {
          run.until(kSteps + 20);
        } catch (const Error& error) {
          said[run.rank] = error.what();
        }
      });
      EXPECT_THAT(said[victim], HasSubstr(prefix)) << "its own drive";
      EXPECT_THAT(said[1 - victim], AnyOf(HasSubstr(fmt::format("rank {}: ", victim)),  // told
                                          HasSubstr(fmt::format("rank {} (", victim)),  // or missed, with its host
                                          HasSubstr(prefix)));                          // or rank 0's words are all's
      disk.misbehave({});
      run_ranks(kRanks, [&](Communicator& communicator) {
        RankRun run(of, &communicator, directory.path(), OnExisting::kResume);
        EXPECT_GE(run.engine->current_step(), 1u);
        if (run.engine->current_step() > kSteps) return;  // it was long in failing
        run.until(kSteps);
        EXPECT_TRUE(exported(*run.engine) == whole.bits);
      });
    }
  }
}

// None of them waits for it, and none has what was written.
TEST_P(OneDriveFails, SingleValuesAreAnErrorOnAllRanksAndTheStoreHasTheOldOnes) {
  RanksCase of{.layout = layout_case("nvme")};
  of.change = [](Config& config) { config.io_engine = IoEngineKind::kThreads; };
  for (const std::uint32_t victim : {0u, 1u}) {
    SCOPED_TRACE(fmt::format("rank {}", victim));
    const TempDirectory directory = quick_directory();
    SimulatedDisk disk(directory.path());
    const std::string prefix = fmt::format("rank{}/", victim);
    std::vector<std::string> said(kRanks);
    std::vector<std::uint32_t> before;
    run_ranks(kRanks, [&](Communicator& communicator) {
      RankRun run(of, &communicator, directory.path());
      run.until(2);
      run.engine->flush();
      const auto bits = exported(*run.engine);
      if (run.rank == victim) {
        before = bits;
        disk.misbehave([&](const DiskCall& call) {
          return call.op == GetParam().op && call.name.starts_with(prefix) ? Fault{.error = GetParam().error} : Fault{};
        });
      }
      const std::vector<float> values(count_of(run.model.blocks[1].parameters[0]), 0.5f);
      said[run.rank] = error_of([&] { run.engine->write_values(ParameterValues::kMaster, 1, 0, values); }).what();
      EXPECT_EQ(error_of([&] { run.engine->flush(); }).code(), Code::kIo);
    });
    EXPECT_THAT(said, Each(HasSubstr(prefix)));
    disk.misbehave({});
    run_ranks(kRanks, [&](Communicator& communicator) {
      RankRun run(of, &communicator, directory.path(), OnExisting::kResume);
      EXPECT_EQ(run.engine->current_step(), 2u);
      EXPECT_TRUE(exported(*run.engine) == before);
      run.until(kSteps);
    });
  }
}

// At once, and when a part of it has been shown.
TEST(OneDriveFailsToRead, WhatCannotBeReadOfAParameterIsAnErrorOnAllRanks) {
  RanksCase of{.layout = layout_case("nvme")};
  of.layout.width = 60'000;
  of.layout.tile_elements = 1 << 14;
  of.change = [](Config& config) { config.io_engine = IoEngineKind::kThreads; };
  for (const std::uint32_t victim : {0u, 1u}) {
    for (const std::uint64_t calls : {0u, 18u}) {
      SCOPED_TRACE(fmt::format("rank {}, after {} calls", victim, calls));
      const TempDirectory directory = quick_directory();
      SimulatedDisk disk(directory.path());
      const std::string prefix = fmt::format("rank{}/", victim);
      std::vector<std::string> said(kRanks);
      std::vector<std::uint64_t> shown(kRanks);
      std::atomic<std::uint64_t> seen = 0;
      run_ranks(kRanks, [&](Communicator& communicator) {
        RankRun run(of, &communicator, directory.path());
        run.until(1);
        run.engine->flush();
        exported(*run.engine);  // nobody reads ahead any more
        if (run.rank == victim) {
          disk.misbehave([&](const DiskCall& call) {
            const bool mine = call.op == DiskOp::kRead && call.name.starts_with(prefix);
            return mine && seen++ >= calls ? Fault{.error = EIO} : Fault{};
          });
        }
        const auto count = [&](auto, auto, auto, std::span<const float> values) { shown[run.rank] += values.size(); };
        said[run.rank] = error_of([&] { run.engine->read_values(ParameterValues::kMaster, 0, 0, count); }).what();
      });
      EXPECT_THAT(said, Each(HasSubstr(prefix)));
      EXPECT_EQ(shown[0], shown[1]);
      EXPECT_EQ(shown[0] > 0, calls > 0 || victim == 1);  // rank 0's part comes first
    }
  }
}

// Gradients are finite, and what the update makes of them is not, where one rank owns it.
TEST(OneUpdateOverflows, AllRanksEndAndGoOnFromTheStepBefore) {
  RanksCase of{.layout = layout_case("nvme"), .type = DType::kFloat16};
  of.layout.width = 300;
  const RanksOutcome whole = train_on_ranks(kRanks, of, kSteps);
  TempStore store;
  std::vector<std::string> said(kRanks);
  run_ranks(kRanks, [&](Communicator& communicator) {
    RankRun run(of, &communicator, store.path());
    run.until(2);
    run.engine->flush();
    run.engine->set_learning_rate(1e6);
    run.trainer->brings = [](const ToyPush& push) {
      return push.block == 2 && push.parameter == 0 ? Brings::kGradient : Brings::kNothing;
    };
    const Error error = error_of([&] {
      run.trainer->run_step();
      run.engine->flush();
    });
    EXPECT_EQ(error.code(), Code::kNonFinite);
    said[run.rank] = error.what();
  });
  EXPECT_THAT(said, ::testing::Contains(HasSubstr("a weight or optimizer state overflowed in the update")));
  EXPECT_THAT(said, Each(HasSubstr("overflowed")));
  run_ranks(kRanks, [&](Communicator& communicator) {
    RankRun run(of, &communicator, store.path(), OnExisting::kResume);
    EXPECT_EQ(run.engine->current_step(), 2u);
    run.until(kSteps);
    EXPECT_TRUE(exported(*run.engine) == whole.bits);
  });
}

}  // namespace
}  // namespace spillway::testing
