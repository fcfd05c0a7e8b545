// What the tables of keys are written with. Places of values in a Config: set and read back by pointers to members.
//
// Meaning and defaults are those of DeepSpeed's documentation ("DeepSpeed Configuration JSON") and of its 0.19.8
// source; section "spillway" is ours. "auto" is what transformers (integrations/deepspeed.py, trainer_config_process
// and trainer_config_finalize) and accelerate (utils/dataclasses.py, DeepSpeedPlugin) fill in.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>

#include "src/config/table.h"

namespace spillway {

// A value as JSON; an optional one that is not set is an empty text.
inline std::string json_of(bool value) { return value ? "true" : "false"; }
inline std::string json_of(double value) { return fmt::format("{}", value); }  // the shortest that reads back the same
template <class Integer>
requires std::is_integral_v<Integer> std::string json_of(Integer value) { return std::to_string(value); }
template <class T>
std::string json_of(const std::optional<T>& value) {
  return value ? json_of(*value) : "";
}
inline std::string json_of(std::string_view text) { return json_string(text); }
template <class Enum>
requires std::is_enum_v<Enum> std::string json_of(Enum value) { return json_string(name_of(value)); }
template <class T>
std::string json_of(const std::vector<T>& values) {
  std::string items;
  for (const T& value : values) items += (items.empty() ? "" : ", ") + json_of(value);
  return "[" + items + "]";
}

template <class T>
void assign(T& member, const KeyValue& value) {
  if constexpr (std::is_same_v<T, bool>) {
    member = value.flag;
  } else if constexpr (std::is_floating_point_v<T>) {
    member = value.number;
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    member = static_cast<T>(value.integer);
  } else if constexpr (std::is_same_v<T, std::string>) {
    member = value.text;
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    member = value.numbers;
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    member = value.texts;
  } else {  // std::optional of one of them
    assign(member.emplace(), value);
  }
}

// A list that stands beside its enumeration, in its order, as ConfigKey::allowed has words.
constexpr std::string_view word_of(std::string_view word) { return word; }
template <class Enum>
requires std::is_enum_v<Enum>
constexpr std::string_view word_of(Enum value) { return name_of(value); }
template <const auto& list>
constexpr auto kJoined = [] {
  constexpr std::size_t kSize = std::accumulate(
      list.begin(), list.end(), list.size(), [](std::size_t sum, auto value) { return sum + word_of(value).size(); });
  std::array<char, kSize> text = {};
  char* end = text.data();
  for (const auto value : list) end = std::ranges::copy(word_of(value), end).out, *end++ = '|';
  return text;
}();
template <const auto& list>
constexpr std::string_view any_of = {kJoined<list>.data(), kJoined<list>.size() - 1};

// A member of Config, or a member of a member.
template <auto... members>
constexpr KeyPlace at = {[](ConfigDraft& draft, const KeyValue& value) { assign((draft.config.*....*members), value); },
                         [](const Config& config) { return json_of((config.*....*members)); }};

// A member of the draft, which other keys decide about as well; read back from the configuration that came of it.
template <auto member>
constexpr KeyPlace drafted(std::string (*show)(const Config&) = nullptr) {
  return {[](ConfigDraft& draft, const KeyValue& value) { assign(draft.*member, value); }, show};
}

// Members that are no plain values.
std::string first_path(const Config& config);
std::string all_paths(const Config& config);
std::string all_groups(const Config& config);
std::string pair_of(double first, double second);

namespace key_rows {

using enum KeyKind;
using C = Config;
using D = ConfigDraft;
using V = KeyValue;
using A = AutoValues;
using Knobs = DeepSpeedKnobs;
using L = LoraConfig;
using K = ConfigKey;

inline constexpr double kMost32 = 4294967295.0;
inline constexpr std::string_view kDevices = "none|cpu|nvme";

inline constexpr KeyPlace kAsWritten = {[](D&, const V&) {}};  // read from the settings, by callers

// "auto" that is always the same.
template <std::size_t size>
struct Text {
  constexpr Text(const char (&text)[size]) { std::copy_n(text, size, value); }
  char value[size];
};
template <Text text>
std::string always(const A&) {
  return text.value;
}

}  // namespace key_rows
}  // namespace spillway
