// IEEE half precision as bits: widened exactly, and rounded to.
#pragma once

#include "spillway/cplusplus.h"

#include <bit>
#include <cstdint>

namespace spillway {

constexpr float fp16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN: the payload keeps its place below the exponent, as hardware does it
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
  }
  // Moved into fp32's fields, the exponent is 127 - 15 = 112 too small. Multiplying by 2^112 mends it, subnormals
  // included: they are subnormal fp32 numbers then, and the product is exact.
  const float small = std::bit_cast<float>(magnitude << 13);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(small * 0x1p112f) | sign);
}

// Whether rounding leaves a number a number: the largest is 65,504, and from 65,520 on it is infinity. NaN stays NaN.
constexpr bool fits_fp16(float value) { return !(value >= 65520.0f || value <= -65520.0f); }

// Rounds to nearest, ties to even; from 65,520 on to infinity. NaN stays NaN (quiet bit set).
constexpr std::uint16_t float_to_fp16(float value) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(u >> 16 & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65,520
  // Normal: 13 bits of the fraction go, and 112 from the exponent. A carry into the exponent is right as it is.
  if (magnitude >= 0x38800000u) {  // 2^-14
    const std::uint32_t odd = magnitude >> 13 & 1u;
    return static_cast<std::uint16_t>(sign | (magnitude - (112u << 23) + 0xfffu + odd) >> 13);
  }
  // Subnormal: a multiple of 2^-24. Added to 0.5, whose last bit is 2^-24, the sum rounds to one.
  const float sum = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - std::bit_cast<std::uint32_t>(0.5f)));
}

}  // namespace spillway
