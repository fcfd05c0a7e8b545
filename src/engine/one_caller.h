// Notices that two threads call one object at the same time, and that a call comes from inside another, by one atomic
// word: the thread whose call is under way, and whether it only asks for a value. Calls that change something are
// refused (enter()); those that only ask, or that cannot be refused, wait (ask(), wait()).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "spillway/error.h"

namespace spillway {

class OneCaller {
 public:
  // A call lasts as long as this.
  class Turn {
   public:
    Turn(Turn&& other) noexcept : of_(std::exchange(other.of_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (of_) of_->inside_.store(0, std::memory_order_release);
    }
    bool outermost() const noexcept { return of_ != nullptr; }

   private:
    friend class OneCaller;
    explicit Turn(OneCaller* of) : of_(of) {}
    OneCaller* of_;
  };

  // Throws kBusy while another thread's call is under way, and kInvalidArgument from inside of one of this thread.
  Turn enter(const char* call) {
    for (;;) {
      std::uintptr_t inside = 0;
      if (inside_.compare_exchange_weak(inside, here(), std::memory_order_acquire)) return Turn(this);
      if ((inside & ~kAsking) == here()) {
        throw Error(Code::kInvalidArgument, {call, "was called from inside of another call", 0,
                                             "weight sources, weight sinks and the log must not call the engine"});
      }
      if (inside != 0 && (inside & kAsking) == 0) {
        throw Error(Code::kBusy,
                    {call, "was called while another thread's call is under way", 0, "let one thread call at a time"});
      }
      if (inside != 0) pause();
    }
  }
  // For what asks for a value: it waits for the end of another thread's call, and may come from inside of one of this
  // thread.
  Turn ask() { return wait_as(here() | kAsking); }
  // For what cannot be refused: the same.
  Turn wait() { return wait_as(here()); }

 private:
  static constexpr std::uintptr_t kAsking = 1;

  static std::uintptr_t here() {
    alignas(2) static thread_local char mark;
    return reinterpret_cast<std::uintptr_t>(&mark);
  }
  static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }
  Turn wait_as(std::uintptr_t me) {
    for (;;) {
      std::uintptr_t inside = 0;
      if (inside_.compare_exchange_weak(inside, me, std::memory_order_acquire)) return Turn(this);
      if ((inside & ~kAsking) == here()) return Turn(nullptr);
      if (inside != 0) pause();
    }
  }

  std::atomic<std::uintptr_t> inside_ = 0;
};

}  // namespace spillway
