// Texts for a terminal or a log may hold a path, a blob or a name from a foreign file. Masked, they cannot control a
// terminal, nor begin a line of their own. Errors and log messages are masked where they are made.
#pragma once

#include "spillway/cplusplus.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace spillway {

// Bytes of the UTF-8 character that the text begins with; 0: it begins with none.
inline std::size_t character_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t bytes = first < 0x80   ? 1
                            : first < 0xc2 ? 0
                            : first < 0xe0 ? 2
                            : first < 0xf0 ? 3
                            : first < 0xf5 ? 4
                                           : 0;
  if (bytes > text.size()) return 0;
  const bool whole = std::ranges::all_of(text.substr(0, bytes).substr(bytes > 0),
                                         [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; });
  return whole ? bytes : 0;
}

// C0 and C1: the second kind is U+0080 to U+009F, or such a byte alone on a terminal that knows no UTF-8.
inline bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || (first >= 0x7f && first < 0xa0);
  return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

enum class LineEnds : std::uint8_t {
  kMask,  // for one line
  kKeep,  // they are the text's own, as its tabs are
};

// `?` for each control character.
inline std::string masked(std::string_view text, LineEnds line_ends) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const std::string_view character = text.substr(0, std::max<std::size_t>(1, character_bytes(text)));
    const bool kept = line_ends == LineEnds::kKeep && (character == "\n" || character == "\t");
    shown += is_control(character) && !kept ? "?" : character;
    text.remove_prefix(character.size());
  }
  return shown;
}

}  // namespace spillway
