#include "kernels/workers.h"

#include <fmt/format.h>

#include <atomic>
#include <mutex>

#include "kernels/float_environment.h"
#include "kernels/process_limits.h"
#include "kernels/tbb_arena.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

// One thread: the caller's. An arena of one would not do: oneTBB gives it a second slot for enqueued work, and two
// callers would run side by side, one of them in slot 1. A body may call parallel_for again, hence the recursive mutex.
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

class ArenaWorkers final : public HostWorkers {
 public:
  explicit ArenaWorkers(unsigned threads) : threads_(threads), arena_(threads) {
    const unsigned usable = arena_.usable_threads();
    if (usable == threads) return;
    log(LogLevel::kWarning,
        fmt::format("this program limits oneTBB to {} threads (tbb::global_control): computing with {} instead of {}",
                    usable, usable, threads));
  }

  unsigned threads() const noexcept override { return threads_; }

  unsigned current_slot() const noexcept override {
    const int slot = TbbArena::current_slot();
    SPILLWAY_CHECK(slot >= 0 && static_cast<unsigned>(slot) < threads_, "current_slot() belongs inside a body");
    return static_cast<unsigned>(slot);
  }

  void parallel_for(std::size_t count, IndexBody body) override {
    if (count == 0) return;
    Loop loop{body};
    loop.begun.store(true, std::memory_order_release);
    arena_.split(count, &Loop::run, &loop);
    static_cast<void>(loop.ranges_done.load(std::memory_order_acquire));
  }

 private:
  // The atomics repeat an order that oneTBB keeps already, where thread sanitizer can see it (kernels/tbb_arena.h):
  // what the caller wrote before the loop, the bodies read; what they write, the caller reads after it.
  struct Loop {
    IndexBody body;
    std::atomic<bool> begun = false;
    std::atomic<std::size_t> ranges_done = 0;

    static void run(void* self, std::size_t begin, std::size_t end) {
      auto& loop = *static_cast<Loop*>(self);
      static_cast<void>(loop.begun.load(std::memory_order_acquire));
      {
        const DefaultFloatEnvironment environment;
        for (std::size_t i = begin; i != end; ++i) loop.body(i);
      }
      loop.ranges_done.fetch_add(1, std::memory_order_release);
    }
  };

  unsigned threads_;
  TbbArena arena_;
};

}  // namespace

std::unique_ptr<HostWorkers> create_workers(unsigned threads) {
  if (threads == 0) threads = usable_cores();
  if (threads == 1) return std::make_unique<SingleWorker>();
  return std::make_unique<ArenaWorkers>(threads);
}

}  // namespace spillway
