// Whether a gradient has NaN or Inf, at the speed of memory: without the sums of norm.h.
#pragma once

#include <cstddef>

#include "spillway/dtype.h"

namespace spillway {

// The calling thread alone.
bool all_finite(const void* data, DType type, std::size_t count);

}  // namespace spillway
