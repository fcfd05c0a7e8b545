#include "kernels/workers.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "kernels/float_environment.h"
#include "kernels/process_limits.h"
#include "spillway/log.h"

namespace spillway {
namespace {

class Workers : public testing::TestWithParam<unsigned> {
 protected:
  std::unique_ptr<HostWorkers> workers_ = create_workers(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Threads, Workers, testing::Values(1, 2, 5));

TEST_P(Workers, EveryIndexRunsOnce) {
  EXPECT_EQ(workers_->threads(), GetParam());
  for (std::size_t count : {0, 1, 2, 3, 4, 5, 7, 64, 1'000, 10'007}) {
    std::vector<std::atomic<int>> runs(count + 1);
    workers_->parallel_for(count, [&](std::size_t i) { runs[i].fetch_add(1); });
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(runs[i], 1) << i << " of " << count;
    EXPECT_EQ(runs[count], 0);
  }
}

TEST_P(Workers, ResultsAreVisibleToTheCaller) {
  std::vector<std::size_t> squares(5'000);
  workers_->parallel_for(squares.size(), [&](std::size_t i) { squares[i] = i * i; });
  for (std::size_t i = 0; i < squares.size(); ++i) ASSERT_EQ(squares[i], i * i);
}

// Four threads call at once; every body holds its slot's flag, so that a slot used twice at one time is seen.
TEST_P(Workers, ConcurrentCallersShareTheSlots) {
  std::vector<std::atomic<int>> holders(GetParam());
  std::atomic<int> shared_slots = 0;
  std::vector<std::vector<std::atomic<int>>> runs(4);
  for (auto& each : runs) each = std::vector<std::atomic<int>>(200);
  {
    std::vector<std::jthread> callers;
    for (std::size_t caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&, caller] {
        for (int round = 0; round < 20; ++round) {
          workers_->parallel_for(200, [&](std::size_t i) {
            const unsigned slot = workers_->current_slot();
            if (slot >= GetParam() || holders[slot].fetch_add(1) != 0) shared_slots.fetch_add(1);
            runs[caller][i].fetch_add(1);
            if (i % 50 == 0) std::this_thread::yield();
            if (slot < GetParam()) holders[slot].fetch_sub(1);
          });
        }
      });
    }
  }
  EXPECT_EQ(shared_slots, 0);
  for (const auto& each : runs)
    for (const auto& count : each) ASSERT_EQ(count, 20);
}

TEST_P(Workers, ABodyMayCallParallelFor) {
  std::vector<std::atomic<int>> runs(16 * 16);
  workers_->parallel_for(16, [&](std::size_t i) {
    const unsigned slot = workers_->current_slot();
    workers_->parallel_for(16, [&](std::size_t j) { runs[i * 16 + j].fetch_add(1); });
    EXPECT_EQ(workers_->current_slot(), slot);
  });
  for (const auto& count : runs) ASSERT_EQ(count, 1);
}

#if defined(__x86_64__)
TEST_P(Workers, BodiesComputeInTheDefaultFloatEnvironment) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  std::atomic<int> flushed = 0;
  {
    const auto made_while_flushing = create_workers(GetParam());
    made_while_flushing->parallel_for(1'000, [&](std::size_t) { flushed += (_mm_getcsr() & 0x8040u) != 0; });
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
  _mm_setcsr(saved);
  EXPECT_EQ(flushed, 0);
}
#endif

// As many threads as asked for, also on a machine with fewer cores: five bodies can only meet when five threads run.
TEST(CreateWorkers, MoreThreadsThanCoresReallyRun) {
  const unsigned threads = std::thread::hardware_concurrency() + 3;
  const auto workers = create_workers(threads);
  std::atomic<unsigned> arrived = 0;
  workers->parallel_for(threads, [&](std::size_t) {
    arrived.fetch_add(1);
    while (arrived < threads) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, threads);
}

TEST(CreateWorkers, ALimitOfTheHostProgramIsReported) {
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 2);
  std::string message;
  set_log_sink([&](LogLevel, std::string_view text) { message = text; });
  const auto workers = create_workers(4);
  set_log_sink({});
  EXPECT_EQ(message, "this program limits oneTBB to 2 threads (tbb::global_control): computing with 2 instead of 4");
  std::atomic<int> runs = 0;
  workers->parallel_for(100, [&](std::size_t) { ++runs; });
  EXPECT_EQ(runs, 100);
}

TEST(CreateWorkers, ZeroMeansTheUsableCores) { EXPECT_EQ(create_workers(0)->threads(), usable_cores()); }

}  // namespace
}  // namespace spillway
