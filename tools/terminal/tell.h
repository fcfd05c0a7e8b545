// What commands say, on standard output and standard error. It may hold a path, a blob or a line of a foreign file, so
// nothing in it commands a terminal. A stream that takes no more ends nothing: std::ferror() keeps it for main(), whose
// exit code tells.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "spillway/masked.h"

namespace spillway::terminal {

// `?` for each control character that is neither a line's end nor a tab. `colours`: those of a report (`ESC [ 1;31 m`)
// stay.
std::string masked_report(std::string_view text, bool colours = false);

// Whether `out` is a terminal, and nothing in the environment is against colours (NO_COLOR, TERM=dumb).
bool shows_colours(std::FILE* out);

// A word of a command that a user is told to type, as a shell takes it: in quotes where it has to be.
std::string shell_word(const std::string& text);

void write(std::FILE* out, std::string_view text) noexcept;

template <typename... Arguments>
void tell(std::FILE* out, fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  write(out, masked(fmt::format(format, std::forward<Arguments>(arguments)...), LineEnds::kKeep));
}

template <typename... Arguments>
void tell(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  tell(stdout, format, std::forward<Arguments>(arguments)...);
}

}  // namespace spillway::terminal
