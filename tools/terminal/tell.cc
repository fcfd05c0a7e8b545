#include "tools/terminal/tell.h"

#include <algorithm>
#include <cstddef>

namespace spillway::terminal {
namespace {

// Bytes of the UTF-8 character that the text begins with; 0: it begins with none.
std::size_t character_bytes(std::string_view text) {
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
bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return (first < 0x20 && first != '\n' && first != '\t') || (first >= 0x7f && first < 0xa0);
  return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

// Bytes of the colour that the text begins with; 0: it begins with none.
std::size_t colour_bytes(std::string_view text) {
  if (!text.starts_with("\x1b[")) return 0;
  const std::size_t end = text.find_first_not_of("0123456789;", 2);
  return end != text.npos && text[end] == 'm' ? end + 1 : 0;
}

}  // namespace

std::string masked(std::string_view text, bool colours) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const std::size_t colour = colours ? colour_bytes(text) : 0;
    const std::size_t bytes = colour > 0 ? colour : std::max<std::size_t>(1, character_bytes(text));
    if (colour == 0 && is_control(text.substr(0, bytes)))
      shown += '?';
    else
      shown += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return shown;
}

void write(std::FILE* out, std::string_view text) noexcept { std::fwrite(text.data(), 1, text.size(), out); }

}  // namespace spillway::terminal
