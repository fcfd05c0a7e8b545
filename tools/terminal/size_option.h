// An option that takes a size.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "tools/terminal/amount.h"

namespace spillway::terminal {

// option->transform(as_size()): what was typed becomes whole bytes.
inline CLI::Validator as_size() {
  const auto to_bytes = [](std::string& text) {
    const auto bytes = size_of_text(text);
    if (!bytes || *bytes < 1) return text + " is not a size such as 24GiB (2^30) or 2TB (10^12)";
    text = fmt::format("{:.0f}", *bytes);
    return std::string();
  };
  return {to_bytes, "SIZE", "size"};
}

}  // namespace spillway::terminal
