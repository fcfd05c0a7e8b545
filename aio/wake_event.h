// An eventfd that interrupts a wait.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>

#include "spillway/error.h"

namespace spillway {

// Seconds as a timespec-like pair. Waits of more than a day are cut to one: callers loop.
template <class Timespec>
Timespec to_timespec(double seconds) noexcept {
  const double bounded = std::fmin(std::fmax(seconds, 0.0), 86400.0);
  Timespec spec{};
  spec.tv_sec = static_cast<decltype(spec.tv_sec)>(bounded);
  spec.tv_nsec = static_cast<decltype(spec.tv_nsec)>((bounded - std::floor(bounded)) * 1e9);
  return spec;
}

class WakeEvent {
 public:
  WakeEvent() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0)
      throw Error(Code::kIo, {"eventfd", "cannot be created", errno, "raise the open files limit (ulimit -n)"});
  }
  ~WakeEvent() { ::close(fd_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  int fd() const noexcept { return fd_; }

  // Any thread, any signal handler: a write that cannot fail but by a full counter, which is awake already.
  void set() noexcept {
    const int saved_errno = errno;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = ::write(fd_, &one, sizeof one);
    errno = saved_errno;
  }
  // True when it was set since the last clear.
  bool clear() noexcept {
    std::uint64_t count;
    return ::read(fd_, &count, sizeof count) == static_cast<ssize_t>(sizeof count);
  }
  // Negative: for ever. May return early.
  void wait(double timeout_seconds) noexcept {
    struct pollfd set {
      fd_, POLLIN, 0
    };
    const auto spec = to_timespec<struct timespec>(timeout_seconds);
    ::ppoll(&set, 1, timeout_seconds < 0 ? nullptr : &spec, nullptr);
  }

 private:
  int fd_;
};

}  // namespace spillway
