#include "tools/terminal/interrupt.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <utility>

namespace spillway::terminal {

Interrupt::Interrupt(std::string ending) : ending_(std::move(ending)) {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  watcher_ = std::thread([this] { watch(); });
}

Interrupt::~Interrupt() {
  stop_ = true;
  watcher_.join();
  pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
}

void Interrupt::watch() {
  const timespec patience{.tv_sec = 0, .tv_nsec = 100'000'000};
  while (!stop_) {
    const int signal = sigtimedwait(&signals_, nullptr, &patience);
    if (signal < 0) continue;
    if (requested()) _exit(exit_code());  // whatever is written is as after any crash
    signal_ = signal;
    fmt::print(stderr, "\nspillway: {}; Ctrl-C again ends at once\n", ending_);
  }
}

}  // namespace spillway::terminal
