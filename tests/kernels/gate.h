// Holds streams of a device up, for tests that look at what happens meanwhile.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/device.h"

namespace spillway {

// Holds a stream up until it is opened; says when the stream has reached it.
class Gate {
 public:
  void enqueue(Device& device, Stream& stream) { device.call_async(&Gate::pass, this, stream); }
  void open() { open_ = true; }
  void wait_reached() const {
    while (!reached_) std::this_thread::yield();
  }
  ~Gate() { open_ = true; }

 private:
  static void pass(void* self) {
    auto& gate = *static_cast<Gate*>(self);
    gate.reached_ = true;
    while (!gate.open_) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::atomic<bool> open_ = false, reached_ = false;
};

// Long enough for a stream that wrongly goes on to be caught; a right one never fails, however slow the machine.
inline void give_a_wrong_stream_time() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

}  // namespace spillway
