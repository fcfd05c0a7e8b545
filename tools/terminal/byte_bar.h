// A bar for work that is counted in bytes, on stderr: stdout may be what another program reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "tools/terminal/progress.h"

namespace spillway::terminal {

class ByteBar {
 public:
  explicit ByteBar(std::string what) : what_(std::move(what)) {}
  ~ByteBar() { clear(); }  // before what an exception says
  ByteBar(const ByteBar&) = delete;
  ByteBar& operator=(const ByteBar&) = delete;

  void at(std::uint64_t done, std::uint64_t bytes) {
    if (seconds() < drawn_at_ + 0.1) return;
    drawn_at_ = seconds();
    const double share = bytes == 0 ? 1 : static_cast<double>(done) / static_cast<double>(bytes);
    progress_.at(share, share > 0 ? seconds() * (1 - share) / share : -1, what_);
  }
  void line(std::string_view text) { progress_.line(text); }
  void clear() { progress_.clear(); }
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  const std::string what_;
  Progress progress_{0, 0, stderr};
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double drawn_at_ = 0;
};

}  // namespace spillway::terminal
