// Configurations as texts, for the tests of the parser.
#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {

// The whole message of a refusal.
inline std::string whole_refusal(const std::string& text, const AutoValues& automatic = {}) {
  try {
    config_from_json(text, "c.json", automatic);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

// A line per error, without the lines that show the place, which begin with a space.
inline std::string errors_of(const std::string& message) {
  std::istringstream lines(message);
  std::string errors;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(' ')) errors += (errors.empty() ? "" : "\n") + line;
  }
  return errors;
}

inline std::string refusal(const std::string& text, const AutoValues& automatic = {}) {
  return errors_of(whole_refusal(text, automatic));
}

inline Config parse(const std::string& text) { return config_from_json(text, "c.json"); }

// A text that is complete but for `more`.
inline std::string with(const std::string& more) { return "{\"train_batch_size\": 1, " + more + "}"; }

// What the log says while it lives.
class CapturedLog {
 public:
  CapturedLog() {
    set_log_sink([this](LogLevel, std::string_view message) { lines.emplace_back(message); });
  }
  ~CapturedLog() {
    set_log_sink([](LogLevel, std::string_view) {});
  }
  std::vector<std::string> lines;
};

}  // namespace spillway
