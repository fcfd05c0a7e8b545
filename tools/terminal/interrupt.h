// Ctrl-C, SIGTERM, SIGHUP (the terminal was closed), and SIGPIPE's cause, a reader of standard output that has gone:
// the first asks the run to end when it can. A second Ctrl-C or SIGTERM ends the process at once; a closed terminal
// sends SIGHUP more than once, and Ctrl-C ends what the output is piped to as well, so those two never do. Who started
// the program with SIGHUP or SIGPIPE ignored (nohup) has it go on.
//
// The signals are blocked in the creating thread and in every thread it starts later, and taken by a thread of this
// object; make it before anything that starts threads. SIGPIPE stays ignored, also after it.
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
  bool requested() const noexcept { return signal() != 0; }
  int signal() const noexcept { return signal_.load(); }  // that requested it; 0: none
  // Once requested, what a program ends with, by convention: 129 after SIGHUP, 130 after Ctrl-C, 141 after SIGPIPE, 143
  // after SIGTERM.
  int exit_code() const noexcept { return 128 + signal_.load(); }
  // Where another process says it.
  void say_nothing() noexcept { says_ = false; }

 private:
  void watch();
  void take(int signal);
  const std::string ending_;
  const bool watches_reader_;
  sigset_t signals_;
  std::atomic<int> signal_ = 0;  // the first that came
  std::atomic<bool> stop_ = false, says_ = true;
  std::thread watcher_;
};

}  // namespace spillway::terminal
