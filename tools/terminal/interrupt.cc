#include "tools/terminal/interrupt.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <utility>

#include "tools/terminal/tell.h"

namespace spillway::terminal {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// A terminal that has gone looks alike to poll(); that is SIGHUP's business.
bool is_read_by_another() {
  struct stat output {};
  return fstat(STDOUT_FILENO, &output) == 0 && (S_ISFIFO(output.st_mode) || S_ISSOCK(output.st_mode));
}

bool reader_has_gone() {
  pollfd output{.fd = STDOUT_FILENO, .events = 0, .revents = 0};
  return poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

Interrupt::Interrupt(std::string ending)
    : ending_(std::move(ending)), watches_reader_(!is_ignored(SIGPIPE) && is_read_by_another()) {
  std::signal(SIGPIPE, SIG_IGN);
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  if (!is_ignored(SIGHUP)) sigaddset(&signals_, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  watcher_ = std::thread([this] { watch(); });
}

Interrupt::~Interrupt() {
  stop_ = true;
  watcher_.join();
  // A closed terminal says so more than once, and what a run says at its end is still to be written.
  if (!requested()) pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
}

void Interrupt::watch() {
  const timespec patience{.tv_sec = 0, .tv_nsec = 100'000'000};
  while (!stop_) {
    if (const int signal = sigtimedwait(&signals_, nullptr, &patience); signal > 0) take(signal);
    if (watches_reader_ && reader_has_gone()) take(SIGPIPE);
  }
}

void Interrupt::take(int signal) {
  const bool asked = signal == SIGINT || signal == SIGTERM;
  if (!requested()) {
    signal_ = signal;
    if (says_) tell(stderr, "\nspillway: {}{}\n", ending_, asked ? "; Ctrl-C again ends at once" : "");
  } else if (asked) {
    _exit(exit_code());  // whatever is written is as after any crash
  }
}

}  // namespace spillway::terminal
