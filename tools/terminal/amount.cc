#include "tools/terminal/amount.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <span>
#include <utility>

namespace spillway::terminal {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};
constexpr Unit kSizes[] = {{"", 1},         {"b", 1},       {"k", 1e3},      {"m", 1e6},      {"g", 1e9},
                           {"t", 1e12},     {"p", 1e15},    {"ki", 0x1p10},  {"mi", 0x1p20},  {"gi", 0x1p30},
                           {"ti", 0x1p40},  {"pi", 0x1p50}, {"kb", 1e3},     {"mb", 1e6},     {"gb", 1e9},
                           {"tb", 1e12},    {"pb", 1e15},   {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30},
                           {"tib", 0x1p40}, {"pib", 0x1p50}};
constexpr Unit kCounts[] = {{"", 1}, {"k", 1e3}, {"m", 1e6}, {"b", 1e9}, {"g", 1e9}, {"t", 1e12}};
constexpr double kLargestSize = 0x1p60;
constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};

// A number that is not negative, with one of the units after it.
std::optional<double> scaled(std::string_view text, std::span<const Unit> units) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value) || value < 0) return std::nullopt;
  std::string unit(end, text.data() + text.size());
  std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  unit.erase(0, unit.find_first_not_of(' ') == unit.npos ? 0 : unit.find_first_not_of(' '));
  for (const Unit& known : units) {
    if (known.name == unit) return value * known.factor;
  }
  return std::nullopt;
}

// In the largest unit that it has one of.
std::pair<double, std::size_t> in_units(std::uint64_t bytes) {
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return {value, unit};
}

}  // namespace

std::optional<double> size_of_text(std::string_view text) {
  const auto bytes = scaled(text, kSizes);
  return bytes && *bytes < kLargestSize ? bytes : std::nullopt;
}

std::optional<double> count_of_text(std::string_view text) { return scaled(text, kCounts); }

std::optional<double> number_of_text(std::string_view text) { return scaled(text, std::span(kCounts).first(1)); }

std::string text_of_size(std::uint64_t bytes) {
  const auto [value, unit] = in_units(bytes);
  return fmt::format("{:.{}f} {}", value, value == std::floor(value) ? 0 : 1, kUnits[unit]);
}

std::string fixed_text_of_size(std::uint64_t bytes) {
  constexpr std::array kDigits = {0, 1, 1, 2, 2};
  const auto [value, unit] = in_units(bytes);
  return fmt::format("{:.{}f} {}", value, kDigits[unit], kUnits[unit]);
}

double gb_per_s(double bytes_per_second) { return bytes_per_second / 1e9; }

}  // namespace spillway::terminal
