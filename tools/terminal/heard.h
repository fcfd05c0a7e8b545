// What the library says while something is tried: its log lines, kept instead of printed. Only what says that a request
// hangs is printed as well, since the line that tells of it may never come.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/log.h"
#include "tools/terminal/tell.h"

namespace spillway::terminal {

// From its creation to its end the log goes here and, after that, nowhere. One at a time.
class Heard {
 public:
  Heard() {
    set_log_sink([this](LogLevel, std::string_view message) {
      lines_.emplace_back(message);
      if (hangs(message)) tell(stderr, "spillway: {}\n", message);
    });
  }
  ~Heard() { set_log_sink({}); }
  Heard(const Heard&) = delete;
  Heard& operator=(const Heard&) = delete;

  const std::vector<std::string>& lines() const { return lines_; }
  static bool hangs(std::string_view line) { return line.find("has made no progress") != std::string_view::npos; }

 private:
  std::vector<std::string> lines_;
};

}  // namespace spillway::terminal
