// Where Spillway's own messages go: fallbacks with their price, stalled requests, plans. The sink is the library's only
// mutable global. It may be called from any Spillway thread, one call at a time, and must not wait for one. When it
// throws, the message goes to stderr, and the step goes on. Messages that come while the sink is being called go to
// stderr, too. A message is one line without control characters.
#pragma once

#include "spillway/cplusplus.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "spillway/masked.h"

namespace spillway {

enum class LogLevel { kInfo, kWarning };

using LogSink = std::function<void(LogLevel, std::string_view message)>;

namespace internal {
inline void log_to_stderr(const char* before, std::string_view message) noexcept {
  try {
    std::fprintf(stderr, "spillway: %s%s\n", before, masked(message, LineEnds::kMask).c_str());
  } catch (...) {  // no memory for it
  }
}
class LogState {
 public:
  void set_sink(LogSink sink) {
    auto replaced = std::make_shared<const LogSink>(std::move(sink));
    std::lock_guard lock(mutex_);
    sink_.swap(replaced);
  }
  void log(LogLevel level, std::string_view message) noexcept {
    std::lock_guard lock(mutex_);
    if (calling_) return log_to_stderr("", message);
    calling_ = true;
    const auto sink = sink_;
    try {
      if (*sink) (*sink)(level, masked(message, LineEnds::kMask));
    } catch (...) {
      log_to_stderr("the log sink threw at: ", message);
    }
    calling_ = false;
  }

 private:
  std::recursive_mutex mutex_;  // for a sink that sets another
  bool calling_ = false;
  std::shared_ptr<const LogSink> sink_ =
      std::make_shared<const LogSink>([](LogLevel, std::string_view message) { log_to_stderr("", message); });
};
// One for a program and libspillway.so, whatever is hidden otherwise; src/c/libspillway.map has its guard.
[[gnu::visibility("default")]] inline LogState& log_state() {
  static LogState& state = *new LogState;  // never destroyed: what a program destroys later may log
  return state;
}
}  // namespace internal

// Replaces the sink (default: one line each to stderr, `spillway: ` before it). An empty sink silences the library.
inline void set_log_sink(LogSink sink) { internal::log_state().set_sink(std::move(sink)); }

inline void log(LogLevel level, std::string_view message) noexcept { internal::log_state().log(level, message); }

}  // namespace spillway
