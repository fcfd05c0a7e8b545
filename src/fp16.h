// IEEE half precision as bits, widened exactly.
#pragma once

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

}  // namespace spillway
