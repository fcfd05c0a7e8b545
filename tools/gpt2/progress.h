// A line at the bottom of a terminal: done, total, time left. Silent where output is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace spillway::gpt2 {

class Progress {
 public:
  Progress(std::uint64_t first, std::uint64_t last);
  // Prints a line above the bar.
  void line(std::string_view text);
  void done(std::uint64_t step);
  void clear();

 private:
  void draw(std::uint64_t step);
  bool terminal_;
  std::uint64_t first_, last_, step_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace spillway::gpt2
