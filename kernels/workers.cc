#include "kernels/workers.h"

#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <mutex>

#include "kernels/cores.h"
#include "kernels/float_environment.h"
#include "spillway/error.h"

namespace spillway {
namespace {

// One thread: the caller's. An arena of one would not do: oneTBB gives it a second slot for enqueued work, and two callers
// would run side by side, one of them in slot 1. A body may call parallel_for again, hence the recursive mutex.
class SingleWorker final : public HostWorkers {
 public:
  unsigned threads() const noexcept override { return 1; }
  unsigned current_slot() const noexcept override { return 0; }

  void parallel_for(std::size_t count, IndexBody body) override {
    const std::lock_guard lock(mutex_);
    const DefaultFloatEnvironment environment;
    for (std::size_t i = 0; i < count; ++i) body(i);
  }

 private:
  std::recursive_mutex mutex_;
};

// `threads` slots, one of which is kept for a calling thread. A caller that finds all slots taken hands its loop to the
// workers and sleeps until it is done, so never more than `threads` bodies run at one time.
class ArenaWorkers final : public HostWorkers {
 public:
  explicit ArenaWorkers(unsigned threads) : threads_(threads), arena_(static_cast<int>(threads), 1) {
    arena_.initialize();
  }

  unsigned threads() const noexcept override { return threads_; }

  unsigned current_slot() const noexcept override {
    const int slot = tbb::this_task_arena::current_thread_index();
    SPILLWAY_CHECK(slot >= 0 && static_cast<unsigned>(slot) < threads_, "current_slot() belongs inside a body");
    return static_cast<unsigned>(slot);
  }

  void parallel_for(std::size_t count, IndexBody body) override {
    if (count == 0) return;
    arena_.execute([&] {
      // Isolated: while it waits for its own loop, a thread must not pick up a body of another caller's. Inside a body
      // that called parallel_for, that body would run with the same slot number and overwrite the slot's scratch.
      tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            tbb::blocked_range<std::size_t>(0, count),
            [&](const tbb::blocked_range<std::size_t>& range) {
              const DefaultFloatEnvironment environment;
              for (std::size_t i = range.begin(); i != range.end(); ++i) body(i);
            },
            tbb::static_partitioner());
      });
    });
  }

 private:
  unsigned threads_;
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<HostWorkers> create_workers(unsigned threads) {
  if (threads == 0) threads = usable_cores();
  if (threads == 1) return std::make_unique<SingleWorker>();
  return std::make_unique<ArenaWorkers>(threads);
}

}  // namespace spillway
