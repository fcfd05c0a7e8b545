// Ctrl-C: the first asks the run to end after the current step, the second ends the process at once.
//
// SIGINT and SIGTERM are blocked in the creating thread and in every thread it starts later, and taken by a thread of
// this object; make it before anything that starts threads.
#pragma once

#include <atomic>
#include <csignal>
#include <thread>

namespace spillway::gpt2 {

class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  bool requested() const noexcept { return requested_.load(); }

 private:
  void watch();
  sigset_t signals_;
  std::atomic<bool> requested_ = false, stop_ = false;
  std::thread watcher_;
};

}  // namespace spillway::gpt2
