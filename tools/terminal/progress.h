// A line at the bottom of a terminal: how much is done, and the time left. Silent where the output is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string_view>

namespace spillway::terminal {

class Progress {
 public:
  // `may_draw`: false where what looks like a terminal is none, as a launcher's.
  Progress(std::uint64_t first, std::uint64_t last, std::FILE* out = stdout, bool may_draw = true);
  // Prints a line above the bar.
  void line(std::string_view text);
  // Step `step` of `last` is done; the time left follows from the steps so far.
  void done(std::uint64_t step);
  // For work whose end is known in time, not in steps: a share of it is done, and what it is at.
  void at(double share, double seconds_left, std::string_view what);
  void clear();

 private:
  void draw_step();
  void draw(double share, std::string_view middle, double seconds_left, std::string_view what);
  std::FILE* out_;
  bool terminal_;
  std::uint64_t first_, last_, step_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace spillway::terminal
