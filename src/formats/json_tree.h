// A JSON text as a tree of values that know where they stand, so that an error can say line and column.
//
// Strict JSON, plus comments and trailing commas, which DeepSpeed's own reader (hjson) takes as well. Nesting and size
// are limited: the text may come from anywhere. Duplicate keys are kept; whoever walks the tree reports them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spillway {

struct JsonKey {
  std::string name;
  std::size_t offset = 0;  // of its opening quote
  std::size_t end = 0;     // after its closing quote
};

struct JsonValue {
  enum class Kind : std::uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool flag = false;                          // kBool
  std::size_t offset = 0;                     // of its first byte in the text
  std::size_t end = 0;                        // after its last one; 0: the text ended, or was wrong, before that
  double number = 0;                          // kNumber
  std::optional<std::uint64_t> integer = {};  // kNumber: its value, when that is whole (5e7 is)
  std::string text = {};                      // kString
  std::vector<JsonKey> keys = {};             // kObject: the names of items, in order
  std::vector<JsonValue> items = {};          // kArray, kObject

  // The first member of that name, or null.
  const JsonValue* member(std::string_view name) const;
};

std::string_view name_of(JsonValue::Kind kind);  // "a number", "an object", …

struct JsonLimits {
  std::size_t depth = 64;
  std::size_t values = 100'000;
};

enum class JsonSyntax : std::uint8_t { kOther, kNoComma, kNoName, kNoValue, kInString, kBehindRoot };

struct JsonProblem {
  std::size_t offset = 0;
  std::string what;
  JsonSyntax syntax = JsonSyntax::kOther;  // what was met where something else had to be
};

// Parses `text` into `root`; a problem means that it is not JSON or beyond the limits. `root` has the values that stand
// before the problem then.
std::optional<JsonProblem> parse_json(std::string_view text, const JsonLimits& limits, JsonValue& root);

// Line and column, both from 1; columns count code points.
struct TextPosition {
  std::size_t line = 1, column = 1;
};
TextPosition position_of(std::string_view text, std::size_t offset);

}  // namespace spillway
