#include "kernels/workers.h"

#include <fmt/format.h>

#include <mutex>

#include "kernels/arena_loop.h"
#include "kernels/float_environment.h"
#include "kernels/node_workers.h"
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
  explicit ArenaWorkers(unsigned threads)
      : threads_(threads), arena_({.threads = threads, .for_callers = 1, .process_threads = threads}) {}

  unsigned threads() const noexcept override { return threads_; }
  unsigned usable_threads() const noexcept { return arena_.usable_threads(); }

  unsigned current_slot() const noexcept override {
    const int slot = TbbArena::current_slot();
    SPILLWAY_CHECK(slot >= 0 && static_cast<unsigned>(slot) < threads_, "current_slot() belongs inside a body");
    return static_cast<unsigned>(slot);
  }

  void parallel_for(std::size_t count, IndexBody body) override {
    if (count == 0) return;
    ArenaLoop loop([body](std::size_t begin, std::size_t end) {
      const DefaultFloatEnvironment environment;
      for (std::size_t i = begin; i != end; ++i) body(i);
    });
    loop.run(arena_, count);
  }

 private:
  unsigned threads_;
  TbbArena arena_;
};

template <class Workers>
std::unique_ptr<HostWorkers> reported(std::unique_ptr<Workers> workers) {
  const unsigned usable = workers->usable_threads();
  if (usable != workers->threads()) {
    log(LogLevel::kWarning,
        fmt::format("this program limits oneTBB to {} threads (tbb::global_control): computing with {} instead of {}",
                    usable, usable, workers->threads()));
  }
  return workers;
}

}  // namespace

std::unique_ptr<HostWorkers> create_workers(std::span<const ThreadShare> shares) {
  SPILLWAY_CHECK(!shares.empty(), "somebody has to compute");
  if (shares.size() > 1) return reported(std::make_unique<NodeWorkers>(shares));
  if (shares[0].threads == 1) return std::make_unique<SingleWorker>();
  return reported(std::make_unique<ArenaWorkers>(shares[0].threads));
}

std::unique_ptr<HostWorkers> create_workers(unsigned threads) { return create_workers(share_threads(threads)); }

}  // namespace spillway
