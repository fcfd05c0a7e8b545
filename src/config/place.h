// Places of values in a Config, for the rows of the table: set and read back by pointers to members.
#pragma once

#include <fmt/format.h>

#include <string>
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
  } else if constexpr (std::is_integral_v<T>) {
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

}  // namespace spillway
