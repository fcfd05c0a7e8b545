// Floating-point settings that a host program may have made, all of which change bits.
#pragma once

#include "kernels/float_environment.h"

namespace spillway {

#if defined(__x86_64__)
// Of MXCSR: FTZ, DAZ, round towards zero.
inline constexpr FloatSettings kHostFloatSettings = 0x8040u | 0x6000u;
#else
// Of FPCR: FZ, round towards zero, AHP (halves without Inf and NaN).
inline constexpr FloatSettings kHostFloatSettings = 1u << 24 | 3u << 22 | 1u << 26;
#endif

}  // namespace spillway
