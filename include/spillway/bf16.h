// bfloat16 as bits: conversions, and the exact split of an fp32 master weight into a bf16 weight and a 16-bit residual.
//
//   u  = bits of the fp32 master
//   hi = (u + 0x8000) >> 16           the weight: rounded to nearest, ties away from zero
//   lo = u - (hi << 16)   (mod 2^32)  the residual, a signed 16-bit number
//   u  = (hi << 16) + sign_extend(lo) holds for all 2^32 patterns
#pragma once

#include "spillway/cplusplus.h"

#include <bit>
#include <cstdint>

namespace spillway {

constexpr float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN (quiet bit set).
constexpr std::uint16_t float_to_bf16(float value) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The bits that bf16_to_float() widened, whatever they are; of other values what lies above the lower half.
constexpr std::uint16_t upper_half(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

struct SplitMaster {
  std::uint16_t weight;
  std::int16_t residual;
};

constexpr SplitMaster split_master(float master) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(master);
  const std::uint32_t hi = (u + 0x8000u) >> 16;
  return {static_cast<std::uint16_t>(hi), static_cast<std::int16_t>(static_cast<std::uint16_t>(u - (hi << 16)))};
}

constexpr float join_master(SplitMaster split) {
  const std::uint32_t hi = static_cast<std::uint32_t>(split.weight) << 16;
  return std::bit_cast<float>(hi + static_cast<std::uint32_t>(static_cast<std::int32_t>(split.residual)));
}

}  // namespace spillway
