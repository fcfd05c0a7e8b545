// What to do about an error, in the words of the program.
#pragma once

#include <exception>
#include <string>

#include "spillway/error.h"

namespace spillway::terminal {

// what() in these words. Of an empty path, with which a message may begin, it shows the quotes.
std::string message_of(const std::exception& error);
std::string hint_of(const Error& error);

}  // namespace spillway::terminal
