// Small files of text, as the kernel shows itself in /proc and /sys. A file that cannot be read counts as empty.
#pragma once

#include <charconv>
#include <filesystem>
#include <string>
#include <string_view>

namespace spillway::drive {

std::string contents_of(const std::filesystem::path& file);
std::string read_line(const std::filesystem::path& file);  // the first one, trimmed

// What stands after `key:` in the first line of a text that begins so, trimmed; empty without one.
std::string field_of(std::string_view text, std::string_view key);

// The whole number that a text begins with; without one `otherwise`.
template <typename Number>
Number number_of(std::string_view text, Number otherwise) {
  std::from_chars(text.data(), text.data() + text.size(), otherwise);
  return otherwise;
}

}  // namespace spillway::drive
