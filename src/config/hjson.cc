#include "src/config/hjson.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include "src/config/closest_key.h"
#include "src/config/table.h"

namespace spillway {
namespace {

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$'; }
bool is_decimal(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) { return is_letter(c) || is_decimal(c) || c == '.' || c == '+' || c == '-'; }

// A word or a number around one of its bytes: a reader stops inside of it (tru|u, 1|_000).
struct Token {
  std::size_t start = 0, end = 0;
  std::string_view text;
};

Token token_at(std::string_view text, std::size_t at) {
  Token token{at, at, {}};
  while (token.start > 0 && is_word(text[token.start - 1])) --token.start;
  while (token.end < text.size() && is_word(text[token.end])) ++token.end;
  token.text = text.substr(token.start, token.end - token.start);
  return token;
}

SyntaxAdvice about(const Token& token, std::string what, std::string hint) {
  return {token.start, token.end, std::move(what), std::move(hint)};
}

// 1_000, 0x10, 012, 1., .5, +1, 12GiB
SyntaxAdvice number_advice(const Token& token) {
  const std::string_view number = token.text;
  std::string hint = "write it in decimal digits, without a leading 0";
  if (number.find('_') != std::string_view::npos) {
    hint = "write the digits without _";
  } else if (number.front() == '+' || number.front() == '.' || number.back() == '.') {
    hint = "begin it with a digit, and end it with one, as in 0.5";
  } else if (is_letter(number.back()) && number.find_first_of("xX") == std::string_view::npos) {
    hint = fmt::format("write \"{}\" where a size may have a unit, else the number alone", number);
  }
  return about(token, fmt::format("{} is no number in JSON", number), hint);
}

SyntaxAdvice word_advice(const Token& token) {
  constexpr std::array<std::string_view, 3> kWords = {"true", "false", "null"};
  const std::string_view word = token.text;
  const std::string_view near = word == "None" ? "null" : closest(word, kWords);
  if (!near.empty() && (word == "None" || same_word(word, near) || edit_distance(word, near) <= 1)) {
    return about(token, fmt::format("{} is no value in JSON", word), fmt::format("write {}", near));
  }
  if (word == "NaN" || word == "nan" || word == "Infinity" || word == "inf") {
    return about(token, fmt::format("{} is no number in JSON", word), "write a finite number");
  }
  return about(token, "a string without quotes, which hjson takes and JSON does not",
               fmt::format("write \"{}\"", word));
}

// What begins there, wherever something else was expected.
std::optional<SyntaxAdvice> mark_advice(std::string_view text, std::size_t at) {
  const std::string_view rest = text.substr(at);
  if (rest.starts_with("'''")) {
    return SyntaxAdvice{at, at + 3, "a ''' string, which hjson takes and JSON does not",
                        "write it in one line, in double quotes"};
  }
  if (rest[0] == '\'') {
    const std::size_t closing = std::min(rest.find('\'', 1), rest.size() - 1);
    return SyntaxAdvice{at, at + closing + 1, "single quotes, which hjson takes and JSON does not",
                        "write double quotes"};
  }
  if (rest[0] == '#') {
    return SyntaxAdvice{at, at + 1, "a comment with #, which hjson takes and this reader does not",
                        "begin comments with //"};
  }
  if (rest[0] == ',') return SyntaxAdvice{at, at + 1, "a comma with nothing before it", "take it out"};
  return std::nullopt;
}

}  // namespace

std::optional<SyntaxAdvice> hjson_advice(std::string_view text, const JsonProblem& problem) {
  const std::size_t at = problem.offset;
  if (at >= text.size() || problem.syntax == JsonSyntax::kOther) return std::nullopt;
  if (problem.syntax == JsonSyntax::kInString) {
    // The reader stops at a control character, or beside it.
    const std::size_t control = text.find_first_of("\n\r\t", at > 0 ? at - 1 : at);
    if (control > at + 1) return std::nullopt;
    return SyntaxAdvice{control, control + 1, "a line break or a tab inside a string",
                        "close the quote, or write \\n or \\t"};
  }
  if (problem.syntax == JsonSyntax::kBehindRoot) {
    if (text[at] != ':' && text[at] != ',') return std::nullopt;
    return SyntaxAdvice{at, at + 1, "keys without braces around them, which hjson takes and JSON does not",
                        "put { before the first key and } after the last value"};
  }
  if (auto advice = mark_advice(text, at)) return advice;
  const Token token = token_at(text, at);
  if (!token.text.empty() && (is_word(text[at]) || problem.syntax == JsonSyntax::kNoValue)) {
    const bool number = is_decimal(token.text[0]) || (!is_letter(token.text[0]) && token.text.size() > 1);
    if (problem.syntax == JsonSyntax::kNoName && !number) {
      return about(token, "a key without quotes, which hjson takes and JSON does not",
                   fmt::format("write \"{}\"", token.text));
    }
    const bool inside = token.start < at;
    if (number && (inside || problem.syntax == JsonSyntax::kNoValue)) return number_advice(token);
    if (is_letter(token.text[0]) && problem.syntax == JsonSyntax::kNoValue) return word_advice(token);
  }
  const bool begins_another = text[at] == '"' || text[at] == '{' || text[at] == '[' || is_word(text[at]);
  if (problem.syntax != JsonSyntax::kNoComma || !begins_another) return std::nullopt;
  return SyntaxAdvice{at, at + 1, "a comma is missing before this, which hjson forgives at the end of a line",
                      "put one after the value before"};
}

}  // namespace spillway
