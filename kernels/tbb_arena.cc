#include "kernels/tbb_arena.h"

#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <optional>

namespace spillway {
namespace {

constexpr auto kParallelism = tbb::global_control::max_allowed_parallelism;

std::size_t allowed() { return tbb::global_control::active_value(kParallelism); }

// Isolated: while it waits for its own loop, a thread must not pick up a body of another caller's. Inside a body that
// called parallel_for, that body would run with the same slot number and overwrite the slot's scratch.
void split_here(std::size_t count, void (*range)(void*, std::size_t, std::size_t), void* argument) {
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::size_t>(0, count),
        [&](const tbb::blocked_range<std::size_t>& part) { range(argument, part.begin(), part.end()); },
        tbb::static_partitioner());
  });
}

}  // namespace

// A caller that finds all slots taken hands its loop to the workers and sleeps until it is done, so never more than
// `threads` bodies run at one time. Not true of an arena of one: oneTBB gives it a second slot.
struct TbbArena::State {
  explicit State(const TbbArenaOptions& options)
      : usable(options.process_threads), arena(static_cast<int>(options.threads), options.for_callers) {
    // oneTBB starts at most as many threads as there are cores unless told otherwise, in the whole process. More are
    // asked for only when needed; where the host program set a limit itself, the smaller one holds.
    if (allowed() < usable) wider.emplace(kParallelism, usable);
    usable = static_cast<unsigned>(std::min<std::size_t>(usable, allowed()));
    arena.initialize();
  }

  unsigned usable;
  std::optional<tbb::global_control> wider;
  tbb::task_arena arena;
};

TbbArena::TbbArena(const TbbArenaOptions& options) : state_(std::make_unique<State>(options)) {}
TbbArena::~TbbArena() = default;

unsigned TbbArena::usable_threads() const noexcept { return state_->usable; }

int TbbArena::current_slot() noexcept { return tbb::this_task_arena::current_thread_index(); }

void TbbArena::split(std::size_t count, void (*range)(void*, std::size_t, std::size_t), void* argument) {
  state_->arena.execute([&] { split_here(count, range, argument); });
}

// Not isolated while it waits: the caller is in no body of ours, so it may help whoever else computes in the arena.
void TbbArena::split_beside(std::size_t count, void (*range)(void*, std::size_t, std::size_t), void* argument,
                            void (*meanwhile)(void*), void* context) {
  tbb::task_group loop;
  state_->arena.execute([&] { loop.run([=] { split_here(count, range, argument); }); });
  meanwhile(context);
  state_->arena.execute([&] { loop.wait(); });
}

}  // namespace spillway
