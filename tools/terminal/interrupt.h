// Ctrl-C and SIGTERM: the first asks the run to end when it can, the second ends the process at once.
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
  bool requested() const noexcept { return signal_.load() != 0; }
  // Once requested, what a program ends with, by convention: 130 after Ctrl-C, 143 after SIGTERM.
  int exit_code() const noexcept { return 128 + signal_.load(); }

 private:
  void watch();
  const std::string ending_;
  sigset_t signals_;
  std::atomic<int> signal_ = 0;  // the first that came
  std::atomic<bool> stop_ = false;
  std::thread watcher_;
};

}  // namespace spillway::terminal
