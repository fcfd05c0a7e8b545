// Configurations as texts, for the tests of the parser.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "spillway/config.h"
#include "spillway/error.h"

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

}  // namespace spillway
