// What the library says while something is tried: its log lines, kept instead of printed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spillway/log.h"

namespace spillway::doctor {

// From its creation to its end the log goes here and, behind that, nowhere. One at a time.
class Heard {
 public:
  Heard() {
    set_log_sink([this](LogLevel, std::string_view message) { lines_.emplace_back(message); });
  }
  ~Heard() { set_log_sink({}); }
  Heard(const Heard&) = delete;
  Heard& operator=(const Heard&) = delete;

  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

}  // namespace spillway::doctor
