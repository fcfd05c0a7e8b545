// How a file, or something in one, is refused.
#pragma once

#include <string>
#include <utility>

#include "spillway/error.h"

namespace spillway {

// Throws kInvalidArgument about `object`: a path, or a name in a file and its path.
[[noreturn]] inline void refuse(std::string object, std::string happened, std::string hint) {
  throw Error(
      Code::kInvalidArgument,
      {.object = std::move(object), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

}  // namespace spillway
