#include "tools/terminal/tell.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdlib>

namespace spillway::terminal {
namespace {

// Bytes of the colour that the text begins with; 0: it begins with none.
std::size_t colour_bytes(std::string_view text) {
  if (!text.starts_with("\x1b[")) return 0;
  const std::size_t end = text.find_first_not_of("0123456789;", 2);
  return end != text.npos && text[end] == 'm' ? end + 1 : 0;
}

}  // namespace

std::string masked_report(std::string_view text, bool colours) {
  if (!colours) return masked(text, LineEnds::kKeep);
  std::string shown;
  while (!text.empty()) {
    const std::size_t colour = colour_bytes(text);
    const std::size_t plain = colour > 0 ? 0 : std::min(text.find('\x1b', 1), text.size());
    shown += colour > 0 ? std::string(text.substr(0, colour)) : masked(text.substr(0, plain), LineEnds::kKeep);
    text.remove_prefix(colour + plain);
  }
  return shown;
}

bool shows_colours(std::FILE* out) {
  const char* terminal = std::getenv("TERM");
  return ::isatty(::fileno(out)) == 1 && std::getenv("NO_COLOR") == nullptr &&
         !(terminal && std::string_view(terminal) == "dumb");
}

std::string shell_word(const std::string& text) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("/._-+:@,=").find(c) != std::string_view::npos;
  };
  if (!text.empty() && std::ranges::all_of(text, plain)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

void write(std::FILE* out, std::string_view text) noexcept { std::fwrite(text.data(), 1, text.size(), out); }

}  // namespace spillway::terminal
