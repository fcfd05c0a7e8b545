// Whether output may have colours.
#pragma once

#include <cstdio>

namespace spillway::terminal {

// A terminal, and nothing in the environment against it (NO_COLOR, TERM=dumb).
bool shows_colours(std::FILE* out);

}  // namespace spillway::terminal
