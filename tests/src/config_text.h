// Configurations as texts, for the tests of the parser.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "spillway/config.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {

// The message of a refusal, a line per error.
inline std::string refusal(const std::string& text) {
  try {
    config_from_json(text, "c.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    return error.what();
  }
  return "accepted";
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
