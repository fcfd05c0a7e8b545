// Bulk changes of element type, on the calling thread. Any alignment; `to` and `from` must not overlap. Rounding is to
// nearest, ties to even; a NaN stays a NaN with its sign and becomes quiet where its type changes. The same bits on
// every instruction set.
#pragma once

#include <cstddef>

#include "spillway/dtype.h"

namespace spillway {

// to[i] = from[i].
void cast(void* to, DType to_type, const void* from, DType from_type, std::size_t count);

// accumulator[i] = from[i] (first), or accumulator[i] + from[i] in fp32.
void accumulate(float* accumulator, const void* from, DType from_type, std::size_t count, bool first);

}  // namespace spillway
