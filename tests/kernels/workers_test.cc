#include "kernels/workers.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kernels/process_limits.h"
#include "spillway/log.h"
#include "tests/kernels/host_float_settings.h"

namespace spillway {
namespace {

// Threads of each node. Several nodes share the CPUs of this process: bound to them, which changes nothing but the
// path.
class Workers : public testing::TestWithParam<std::vector<unsigned>> {
 protected:
  static std::unique_ptr<HostWorkers> create() {
    std::vector<ThreadShare> shares;
    for (unsigned threads : GetParam()) shares.push_back({threads, 0, affinity_cpus()});
    return create_workers(shares);
  }

  unsigned threads_ = std::accumulate(GetParam().begin(), GetParam().end(), 0u);
  std::unique_ptr<HostWorkers> workers_ = create();
};
using Shares = std::vector<unsigned>;
INSTANTIATE_TEST_SUITE_P(Shares, Workers,
                         testing::Values(Shares{1}, Shares{2}, Shares{5}, Shares{2, 2}, Shares{3, 2}, Shares{2, 2, 4}),
                         [](const auto& info) {
                           std::string name = "Threads";
                           for (unsigned threads : info.param) name += "_" + std::to_string(threads);
                           return name;
                         });

TEST_P(Workers, EveryIndexRunsOnce) {
  EXPECT_EQ(workers_->threads(), threads_);
  EXPECT_EQ(workers_->nodes(), GetParam().size());
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
  std::vector<std::atomic<int>> holders(threads_);
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
            if (slot >= threads_ || holders[slot].fetch_add(1) != 0) shared_slots.fetch_add(1);
            runs[caller][i].fetch_add(1);
            if (i % 50 == 0) std::this_thread::yield();
            if (slot < threads_) holders[slot].fetch_sub(1);
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

// One body a node, all at one time: they can only meet when they do not wait for each other's end.
TEST_P(Workers, NodesWorkAtTheSameTimeEachWithItsOwnThreads) {
  const std::size_t nodes = workers_->nodes();
  for (std::size_t count = 0; count <= nodes; ++count) {
    std::atomic<std::size_t> arrived = 0;
    std::vector<std::vector<int>> runs(nodes, std::vector<int>(1'000));
    std::vector<std::atomic<unsigned>> slots(nodes);  // a bit each
    workers_->parallel_for_nodes(count, [&](std::size_t node) {
      arrived.fetch_add(1);
      while (arrived < count) std::this_thread::yield();
      workers_->parallel_for(runs[node].size(), [&](std::size_t i) {
        ++runs[node][i];
        slots[node] |= 1u << workers_->current_slot();
      });
    });
    unsigned first_slot = 0;
    for (std::size_t node = 0; node < nodes; ++node) {
      for (int run : runs[node]) ASSERT_EQ(run, node < count ? 1 : 0) << node << " of " << count;
      const unsigned own = ((1u << GetParam()[node]) - 1) << first_slot;
      EXPECT_EQ(slots[node] & ~own, 0u) << "threads of another node took part";
      first_slot += GetParam()[node];
    }
  }
}

TEST_P(Workers, ConcurrentCallersOfNodesShareTheSlots) {
  std::vector<std::atomic<int>> holders(threads_);
  std::atomic<int> shared_slots = 0, runs = 0;
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < 50; ++round) {
          workers_->parallel_for_nodes(workers_->nodes(), [&](std::size_t) {
            workers_->parallel_for(10, [&](std::size_t) {
              const unsigned slot = workers_->current_slot();
              if (holders[slot].fetch_add(1) != 0) shared_slots.fetch_add(1);
              runs.fetch_add(1);
              std::this_thread::yield();
              holders[slot].fetch_sub(1);
            });
          });
        }
      });
    }
  }
  EXPECT_EQ(shared_slots, 0);
  EXPECT_EQ(runs, 4 * 50 * 10 * static_cast<int>(workers_->nodes()));
}

TEST_P(Workers, BodiesComputeInTheDefaultFloatEnvironment) {
  const FloatSettings saved = float_settings();
  set_float_settings(saved | kHostFloatSettings);
  std::atomic<int> flushed = 0;
  {
    const auto made_while_flushing = create();
    made_while_flushing->parallel_for(1'000,
                                      [&](std::size_t) { flushed += (float_settings() & kHostFloatSettings) != 0; });
  }
  EXPECT_EQ(float_settings() & kHostFloatSettings, kHostFloatSettings);
  set_float_settings(saved);
  EXPECT_EQ(flushed, 0);
}

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

}  // namespace
}  // namespace spillway
