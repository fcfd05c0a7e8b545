#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "src/config/closest_key.h"
#include "src/config/table.h"

namespace spillway {
namespace {

// What stood there, for a message; a long text is cut.
std::string shown(const JsonValue& value) {
  if (value.kind == JsonValue::Kind::kString) {
    const bool is_long = value.text.size() > 40;
    return "the string \"" + (is_long ? value.text.substr(0, 40) + "…" : value.text) + "\"";
  }
  if (value.kind == JsonValue::Kind::kNumber) return fmt::format("{}", value.number);
  if (value.kind == JsonValue::Kind::kBool) return value.flag ? "true" : "false";
  return std::string(name_of(value.kind));
}

// Bytes: 4096, "4096", "512MiB", "1.5 GiB", "20GB". Decimal fractions are fine as long as whole bytes come out.
std::optional<std::uint64_t> bytes_of(std::string_view text) {
  struct Unit {
    std::string_view name;
    double bytes;
  };
  constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                            {"B", 1},
                                            {"KiB", 0x1p10},
                                            {"MiB", 0x1p20},
                                            {"GiB", 0x1p30},
                                            {"TiB", 0x1p40},
                                            {"KB", 1e3},
                                            {"MB", 1e6},
                                            {"GB", 1e9},
                                            {"TB", 1e12}}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc{} || !(number >= 0)) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (unit.name != text) continue;
    const double bytes = number * unit.bytes;
    if (bytes > 1e18 || std::floor(bytes) != bytes) return std::nullopt;
    return static_cast<std::uint64_t>(bytes);
  }
  return std::nullopt;
}

// What was most likely meant, as it is to be written; empty when there is no telling.
std::string meant(KeyKind kind, const JsonValue& value) {
  const bool text = value.kind == JsonValue::Kind::kString;
  if (kind == KeyKind::kBool) {
    if (text && (value.text == "true" || value.text == "True")) return "true";
    if (text && (value.text == "false" || value.text == "False")) return "false";
    if (value.integer && *value.integer < 2) return *value.integer == 1 ? "true" : "false";
  } else if (kind == KeyKind::kNumber || kind == KeyKind::kInteger) {
    double number = 0;
    const char* const end = value.text.data() + value.text.size();
    const auto read = std::from_chars(value.text.data(), end, number);
    if (text && read.ec == std::errc() && read.ptr == end && std::isfinite(number)) return value.text;
    const auto bytes = text ? bytes_of(value.text) : std::nullopt;
    if (bytes && kind == KeyKind::kInteger) return std::to_string(*bytes);
  }
  return {};
}

ValueProblem wrong_type(KeyKind kind, std::string_view wanted, const JsonValue& value) {
  std::string hint = fmt::format("write {}", wanted);
  if (const std::string better = meant(kind, value); !better.empty()) {
    hint = fmt::format("write {}{}", better, value.kind == JsonValue::Kind::kString ? ", without quotes" : "");
  }
  // Left in files that the Hugging Face trainer fills in before DeepSpeed sees them.
  if (value.kind == JsonValue::Kind::kString && value.text == "auto") hint = "\"auto\" is not filled in here: " + hint;
  return {fmt::format("expected {}, found {}", wanted, shown(value)), hint};
}

std::optional<ValueProblem> check_range(const ConfigKey& key, double number) {
  const bool in_range = number >= key.least && (key.below_most ? number < key.most : number <= key.most);
  if (in_range) return std::nullopt;
  std::string allowed = fmt::format("{} to {}", key.least, key.most);
  if (key.most >= 1e18) {
    allowed = number < key.least ? fmt::format("at least {}", key.least) : fmt::format("at most {}", key.most);
  }
  if (key.below_most) allowed = fmt::format("at least {} and less than {}", key.least, key.most);
  return ValueProblem{fmt::format("{} is out of range", number), "allowed: " + allowed};
}

std::optional<ValueProblem> read_integer(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  if (value.kind != JsonValue::Kind::kNumber) return wrong_type(key.kind, "a whole number", value);
  if (auto problem = check_range(key, value.number)) return problem;
  if (!value.integer) return wrong_type(key.kind, "a whole number", value);
  out.integer = *value.integer;
  if (out.integer % key.multiple_of == 0) return std::nullopt;
  return ValueProblem{fmt::format("{} is not a multiple of {}", out.integer, key.multiple_of),
                      fmt::format("nearest below: {}", out.integer / key.multiple_of * key.multiple_of)};
}

std::optional<ValueProblem> read_bytes(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  if (value.kind == JsonValue::Kind::kNumber) return read_integer(key, value, out);
  const auto bytes = value.kind == JsonValue::Kind::kString ? bytes_of(value.text) : std::nullopt;
  if (!bytes)
    return wrong_type(key.kind, "bytes, such as 536870912 or \"512MiB\" (KiB, MiB, GiB, TiB, KB, MB, GB, TB)", value);
  out.integer = *bytes;
  return check_range(key, static_cast<double>(*bytes));
}

std::optional<ValueProblem> read_choice(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  const auto words = choices_of(key.allowed);
  if (value.kind != JsonValue::Kind::kString) return wrong_type(key.kind, "one of the words " + list_of(words), value);
  // DeepSpeed takes optimizer names in any case.
  const auto same = [&](std::string_view word) { return same_word(word, value.text); };
  const auto found = std::find_if(words.begin(), words.end(), same);
  if (found == words.end()) {
    const auto refused = choices_of(key.refused), not_with_zero = choices_of(key.not_with_zero);
    const std::string allowed = "allowed: " + list_of(words);
    const bool nor_with_zero = std::any_of(not_with_zero.begin(), not_with_zero.end(), same);
    if (std::any_of(refused.begin(), refused.end(), same)) {
      return ValueProblem{shown(value) + " is DeepSpeed's, and not computed here" +
                              (nor_with_zero ? ", nor by DeepSpeed itself with ZeRO-1, 2 and 3, which refuse it" : ""),
                          allowed};
    }
    const std::string_view near = closest(value.text, words);
    return ValueProblem{shown(value) + " is not known here",
                        (near.empty() ? "" : fmt::format("closest: {}; ", near)) + allowed};
  }
  out.integer = static_cast<std::uint64_t>(found - words.begin());
  return std::nullopt;
}

std::optional<ValueProblem> read_pair(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  const bool fits = value.kind == JsonValue::Kind::kArray && value.items.size() == 2 &&
                    value.items[0].kind == JsonValue::Kind::kNumber && value.items[1].kind == JsonValue::Kind::kNumber;
  if (!fits) return wrong_type(key.kind, fmt::format("two numbers, such as {}", key.standard), value);
  out.number = value.items[0].number;
  out.second = value.items[1].number;
  if (auto problem = check_range(key, out.number)) return problem;
  return check_range(key, out.second);
}

std::optional<ValueProblem> read_text_value(const ConfigKey& key, const JsonValue& value, std::string& out) {
  if (value.kind != JsonValue::Kind::kString) return wrong_type(key.kind, "a string", value);
  // A path with a zero byte would be cut there by the kernel.
  if (value.text.find('\0') != std::string::npos) return ValueProblem{"the string holds a zero byte", "take it out"};
  out = value.text;
  return std::nullopt;
}

std::optional<ValueProblem> read_numbers(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  if (value.kind != JsonValue::Kind::kArray) return wrong_type(key.kind, "an array of numbers", value);
  for (const JsonValue& item : value.items) {
    if (item.kind != JsonValue::Kind::kNumber) return wrong_type(key.kind, "an array of numbers", item);
    if (auto problem = check_range(key, item.number)) return problem;
    out.numbers.push_back(item.number);
  }
  return std::nullopt;
}

std::optional<ValueProblem> read_texts(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  if (value.kind != JsonValue::Kind::kArray) return wrong_type(key.kind, "an array of strings", value);
  for (const JsonValue& item : value.items) {
    if (auto problem = read_text_value(key, item, out.texts.emplace_back())) return problem;
  }
  return std::nullopt;
}

// Where an object says "enabled" and does not leave it off, as a path from there; empty: nowhere.
std::string where_enabled(const JsonValue& value) {
  if (value.kind != JsonValue::Kind::kObject) return {};
  for (std::size_t i = 0; i < value.items.size(); ++i) {
    const std::string& name = value.keys[i].name;
    const JsonValue& item = value.items[i];
    const bool off = item.kind == JsonValue::Kind::kNull || (item.kind == JsonValue::Kind::kBool && !item.flag) ||
                     item.text == "auto";  // which is what transformers make of it: nothing here
    if (name == "enabled" && !off) return name;
    if (const std::string inside = where_enabled(value.items[i]); !inside.empty()) return name + "." + inside;
  }
  return {};
}

std::optional<ValueProblem> read_object(const ConfigKey& key, const JsonValue& value) {
  if (value.kind != JsonValue::Kind::kObject) return wrong_type(key.kind, "an object", value);
  const std::string on = key.kind == KeyKind::kOff ? where_enabled(value) : "";
  if (on.empty()) return std::nullopt;
  if (!key.allowed.empty())
    return ValueProblem{on + " is on, which is DeepSpeed's, and not there", std::string(key.allowed)};
  return ValueProblem{on + " is on, which is DeepSpeed's, and not computed here",
                      "set it to false, or leave the section out"};
}

}  // namespace

std::optional<ValueProblem> read_value(const ConfigKey& key, const JsonValue& value, KeyValue& out) {
  switch (key.kind) {
    case KeyKind::kSection:
      if (value.kind != JsonValue::Kind::kObject) return wrong_type(key.kind, "an object", value);
      return std::nullopt;
    case KeyKind::kBool:
      if (value.kind != JsonValue::Kind::kBool) return wrong_type(key.kind, "true or false", value);
      out.flag = value.flag;
      return std::nullopt;
    case KeyKind::kNumber:
      if (value.kind != JsonValue::Kind::kNumber) return wrong_type(key.kind, "a number", value);
      out.number = value.number;
      return check_range(key, value.number);
    case KeyKind::kText: return read_text_value(key, value, out.text);
    case KeyKind::kInteger: return read_integer(key, value, out);
    case KeyKind::kBytes: return read_bytes(key, value, out);
    case KeyKind::kChoice: return read_choice(key, value, out);
    case KeyKind::kPair: return read_pair(key, value, out);
    case KeyKind::kNumbers: return read_numbers(key, value, out);
    case KeyKind::kTexts: return read_texts(key, value, out);
    case KeyKind::kSections:
      if (value.kind != JsonValue::Kind::kArray) return wrong_type(key.kind, "an array of objects", value);
      return std::nullopt;
    case KeyKind::kOnly:
      if (shown(value) == key.allowed) return std::nullopt;
      return ValueProblem{fmt::format("expected {}, found {}", key.allowed, shown(value)),
                          fmt::format("leave it out ({})", key.doc)};
    case KeyKind::kObject:
    case KeyKind::kOff: return read_object(key, value);
  }
  return std::nullopt;
}

}  // namespace spillway
