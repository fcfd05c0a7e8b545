// Ctrl-C: the first asks the run to end when it can, the second ends the process at once.
//
// SIGINT and SIGTERM are blocked in the creating thread and in every thread it starts later, and taken by a thread of
// this object; make it before anything that starts threads.
#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

namespace spillway::terminal {

class Interrupt {
 public:
  // `ending`: what the first Ctrl-C says is going to happen, as in "ending after this step".
  explicit Interrupt(std::string ending);
  ~Interrupt();
  bool requested() const noexcept { return requested_.load(); }

 private:
  void watch();
  const std::string ending_;
  sigset_t signals_;
  std::atomic<bool> requested_ = false, stop_ = false;
  std::thread watcher_;
};

}  // namespace spillway::terminal
