// fp32 values as they travel between ranks where 16 bits are asked for: rounded, and widened again, in place.
#pragma once

#include <cstddef>
#include <span>

#include "spillway/dtype.h"

namespace spillway {

// `values` are whole fp32 numbers. Rounds to nearest, ties to even; what is too large for fp16 becomes infinite, and
// NaN stays NaN. The first half of the bytes holds them afterwards.
void narrow_in_place(std::span<std::byte> values, DType wire);
// The other way: the first half becomes all of it. Exact.
void widen_in_place(std::span<std::byte> values, DType wire);

}  // namespace spillway
