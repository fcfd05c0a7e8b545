// The error that something ends with.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "spillway/error.h"

namespace spillway::testing {

// Fails the test where `work` is done.
inline Error error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return Error(Code::kUnsupported, {"", "", 0, ""});
}

}  // namespace spillway::testing
