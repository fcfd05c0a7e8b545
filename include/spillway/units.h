// Byte and element arithmetic used by every room.
#pragma once

#include "spillway/cplusplus.h"

#include <concepts>
#include <cstdint>

namespace spillway {

inline constexpr std::uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

template <std::unsigned_integral T>
constexpr T div_up(T value, T unit) {
  return value / unit + (value % unit != 0 ? 1 : 0);
}

// The smallest multiple of `unit` that is at least `value`.
template <std::unsigned_integral T>
constexpr T align_up(T value, T unit) {
  return div_up(value, unit) * unit;
}

template <std::unsigned_integral T>
constexpr T align_down(T value, T unit) {
  return value / unit * unit;
}

}  // namespace spillway
