#include "kernels/tbb_arena.h"

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <optional>

namespace spillway {
namespace {

constexpr auto kParallelism = tbb::global_control::max_allowed_parallelism;

std::size_t allowed() { return tbb::global_control::active_value(kParallelism); }

}  // namespace

// `threads` slots, one of which is kept for a calling thread. A caller that finds all slots taken hands its loop to the
// workers and sleeps until it is done, so never more than `threads` bodies run at one time.
struct TbbArena::State {
  explicit State(unsigned asked) : threads(asked), arena(static_cast<int>(asked), 1) {
    // oneTBB starts at most as many threads as there are cores unless told otherwise, in the whole process. More are
    // asked for only when needed; where the host program set a limit itself, the smaller one holds.
    if (allowed() < threads) wider.emplace(kParallelism, threads);
    usable = static_cast<unsigned>(std::min<std::size_t>(threads, allowed()));
    arena.initialize();
  }

  unsigned threads, usable;
  std::optional<tbb::global_control> wider;
  tbb::task_arena arena;
};

TbbArena::TbbArena(unsigned threads) : state_(std::make_unique<State>(threads)) {}
TbbArena::~TbbArena() = default;

unsigned TbbArena::usable_threads() const noexcept { return state_->usable; }

int TbbArena::current_slot() noexcept { return tbb::this_task_arena::current_thread_index(); }

void TbbArena::split(std::size_t count, void (*range)(void*, std::size_t, std::size_t), void* argument) {
  state_->arena.execute([&] {
    // Isolated: while it waits for its own loop, a thread must not pick up a body of another caller's. Inside a body that
    // called parallel_for, that body would run with the same slot number and overwrite the slot's scratch.
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::size_t>(0, count),
          [&](const tbb::blocked_range<std::size_t>& part) { range(argument, part.begin(), part.end()); },
          tbb::static_partitioner());
    });
  });
}

}  // namespace spillway
