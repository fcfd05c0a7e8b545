// A loop as a TbbArena runs it: range(begin, end) of it at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "kernels/tbb_arena.h"

namespace spillway {

// The atomics repeat an order that oneTBB keeps already, where thread sanitizer can see it (kernels/tbb_arena.h): what
// the caller wrote before the loop, its ranges read; what they write, the caller reads after it.
template <class Range>
class ArenaLoop {
 public:
  explicit ArenaLoop(Range range) : range_(std::move(range)) {}

  void run(TbbArena& arena, std::size_t count) {
    begun_.store(true, std::memory_order_release);
    arena.split(count, &ArenaLoop::run_range, this);
    static_cast<void>(ranges_done_.load(std::memory_order_acquire));
  }

  // While the calling thread does something else first.
  template <class Meanwhile>
  void run_beside(TbbArena& arena, std::size_t count, Meanwhile meanwhile) {
    begun_.store(true, std::memory_order_release);
    arena.split_beside(
        count, &ArenaLoop::run_range, this, [](void* context) { (*static_cast<Meanwhile*>(context))(); }, &meanwhile);
    static_cast<void>(ranges_done_.load(std::memory_order_acquire));
  }

 private:
  static void run_range(void* self, std::size_t begin, std::size_t end) {
    auto& loop = *static_cast<ArenaLoop*>(self);
    static_cast<void>(loop.begun_.load(std::memory_order_acquire));
    loop.range_(begin, end);
    loop.ranges_done_.fetch_add(1, std::memory_order_release);
  }

  Range range_;
  std::atomic<bool> begun_ = false;
  std::atomic<std::size_t> ranges_done_ = 0;
};

}  // namespace spillway
