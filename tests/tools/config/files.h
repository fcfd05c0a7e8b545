// The configurations of tests/tools/config/corpus.txt, which says at its head what it holds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "src/config/reader.h"

namespace spillway {

struct PublishedConfig {
  std::string name, text;
  bool loads = false;
  std::string expected;  // lines `key value`, or the errors
  friend void PrintTo(const PublishedConfig& config, std::ostream* out) { *out << config.name; }
};

// In the order of their names.
inline const std::vector<PublishedConfig>& published_configs() {
  static const std::vector<PublishedConfig> configs = [] {
    std::ifstream file(SPILLWAY_CONFIGS, std::ios::binary);
    EXPECT_TRUE(file.is_open()) << SPILLWAY_CONFIGS;
    std::vector<PublishedConfig> read;
    std::string* part = nullptr;  // that comes
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("== ")) {
        read.emplace_back().name = line.substr(3);
        part = &read.back().text;
      } else if (line == "-- loads" || line == "-- errors") {
        read.back().loads = line == "-- loads";
        part = &read.back().expected;
      } else if (part != nullptr) {
        *part += line + "\n";
      }
    }
    std::ranges::sort(read, {}, &PublishedConfig::name);
    return read;
  }();
  return configs;
}

inline AutoValues known_values() {
  AutoValues values;
  values.hidden_size = 768;
  values.total_steps = 1000;
  return values;
}

inline EffectiveConfig read_text_as_config(const std::string& text) {
  const ConfigText texts[] = {{text, "c"}};
  return read_config(texts, known_values());
}

// A line per error without the name of the file; empty: it loads.
inline std::string errors_in(const std::string& text) {
  try {
    read_text_as_config(text);
    return {};
  } catch (const Error& error) {
    std::istringstream lines(error.what());
    std::string errors;
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("c:")) errors += line.substr(2) + "\n";
    }
    return errors;
  }
}

// Lets the log be silent while it lives.
struct Silence {
  Silence() { set_log_sink({}); }
};

}  // namespace spillway
