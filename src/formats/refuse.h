// How a file, or something in one, is refused.
#pragma once

#include <string>
#include <utility>

#include "spillway/error.h"

namespace spillway {

// Throws kInvalidArgument about `object`: a path, or a name in a file and its path.
[[noreturn]] inline void refuse(std::string object, std::string happened, Hint hint) {
  throw Error(Code::kInvalidArgument, std::move(object), std::move(happened), 0, std::move(hint));
}

}  // namespace spillway
