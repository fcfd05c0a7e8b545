// A struct of the C API as a program gives it: zeros, and its own size.
#pragma once

namespace spillway::testing {

template <typename Struct>
Struct sized() {
  Struct made = {};
  made.struct_size = sizeof made;
  return made;
}

}  // namespace spillway::testing
