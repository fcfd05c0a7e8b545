#include "tools/terminal/colours.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace spillway::terminal {

bool shows_colours(std::FILE* out) {
  const char* terminal = std::getenv("TERM");
  return ::isatty(::fileno(out)) == 1 && std::getenv("NO_COLOR") == nullptr &&
         !(terminal && std::string_view(terminal) == "dumb");
}

}  // namespace spillway::terminal
