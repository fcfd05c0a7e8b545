// Notices that two threads call one object at the same time, and that a call comes from inside of another, by one
// atomic word that names the thread whose call is under way.
#pragma once

#include <atomic>
#include <chrono>
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
      if (of_) of_->thread_.store({}, std::memory_order_release);
    }
    bool outermost() const noexcept { return of_ != nullptr; }

   private:
    friend class OneCaller;
    explicit Turn(OneCaller* of) : of_(of) {}
    OneCaller* of_;
  };

  // Throws kBusy while another thread's call is under way, and kInvalidArgument from inside of one of this thread.
  Turn enter(const char* call) {
    Turn turn = look(call);
    if (turn.outermost()) return turn;
    throw Error(Code::kInvalidArgument, {call, "was called from inside of another call of the engine", 0,
                                         "weight sources, weight sinks and the log must not call it"});
  }
  // For what asks for a value: it may come from inside of another call of the same thread.
  Turn look(const char* call) {
    const std::thread::id here = std::this_thread::get_id();
    std::thread::id inside;
    if (thread_.compare_exchange_strong(inside, here, std::memory_order_acquire)) return Turn(this);
    if (inside == here) return Turn(nullptr);
    throw Error(Code::kBusy, {call, "was called while another thread's call of the engine is under way", 0,
                              "let one thread call at a time"});
  }
  // For what cannot be refused: blocks until no other thread is inside.
  Turn wait() {
    const std::thread::id here = std::this_thread::get_id();
    for (;;) {
      std::thread::id inside;
      if (thread_.compare_exchange_weak(inside, here, std::memory_order_acquire)) return Turn(this);
      if (inside == here) return Turn(nullptr);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  std::atomic<std::thread::id> thread_{};
};

}  // namespace spillway
