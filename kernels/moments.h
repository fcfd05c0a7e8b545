// Moments in fewer bytes, one element at a time: the definition of spillway/optimizer.h, for the reference, the GPU and
// whoever converts states. The caller takes square roots; nothing here is more than +, * and / in fp32 and integers, so
// every compiler and device gives the same bits (built without contraction, as all kernels).
#pragma once

#include "spillway/cplusplus.h"

#include <bit>
#include <cstdint>

#include "spillway/bf16.h"
#include "spillway/optimizer.h"

namespace spillway {

// The largest magnitude that a form holds, as bits. int8: s + |m| must stay finite for every element of the group, so
// the scale is below 2^127.
constexpr std::uint32_t largest_moment(MomentFormat format) {
  return format == MomentFormat::kFloat32 ? 0x7f7fffffu : format == MomentFormat::kBFloat16 ? 0x7f7f0000u : 0x7eff0000u;
}
constexpr std::uint32_t magnitude_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }
constexpr bool is_storable(float moment, MomentFormat format) {
  return magnitude_bits(moment) <= largest_moment(format);
}

// ---- random bits: an integer hash of the index ("lowbias32", C. Wellons, hash-prospector, public domain) with the key
// in two places; 32-bit products alone, which every vector unit has. exp_avg takes the lower 16 bits, exp_avg_sq the
// upper 16.
inline constexpr std::uint32_t kUpperFactor = 0x9e3779b9u, kFirstFactor = 0x7feb352du, kSecondFactor = 0x846ca68bu;

constexpr std::uint32_t rounding_bits(std::uint64_t key, std::uint64_t index) {
  const auto lower = static_cast<std::uint32_t>(index), upper = static_cast<std::uint32_t>(index >> 32);
  std::uint32_t x = lower ^ (upper * kUpperFactor + static_cast<std::uint32_t>(key));
  x = (x ^ (x >> 16)) * kFirstFactor + static_cast<std::uint32_t>(key >> 32);
  x = (x ^ (x >> 15)) * kSecondFactor;
  return x ^ (x >> 16);
}
constexpr std::uint32_t random_of_exp_avg(std::uint32_t bits) { return bits & 0xffffu; }
constexpr std::uint32_t random_of_exp_avg_sq(std::uint32_t bits) { return bits >> 16; }

// SplitMix64 (Steele, Lea and Flood 2014), over the seed and then over the step.
constexpr std::uint64_t rounding_key(std::uint64_t seed, std::uint64_t step) {
  const auto mix = [](std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  return mix(mix(seed) + step);
}

// ---- bf16. What is no number may become one: is_storable() is asked first.
constexpr std::uint16_t moment_to_bf16(float x, std::uint32_t random16) {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(x) + random16) >> 16);
}

// ---- int8: scales.
// `largest`, not negative, rounded up to bf16.
constexpr std::uint16_t scale_to_bf16(float largest) {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(largest) + 0xffffu) >> 16);
}
// A sum whose lowest bits are the nearest integer to x, |x| < 2^22: adding it leaves no room for a fraction.
inline constexpr float kNearest = 0x1.8p23f;
inline constexpr std::uint32_t kNearestBits = 0x4b400000u;
// Divisors for groups whose elements are all 0, below every scale and every sum of others.
inline constexpr float kLeastSum = 0x1p-149f;  // of s + |m|
inline constexpr float kLeastRoot = 0x1p-80f;  // of a scale of square roots, of which the least is 2^-74.5

constexpr std::int8_t exp_avg_to_int8(float m, float scale) {
  const float sum = scale + (m < 0 ? -m : m);
  const float companded = m / (sum > kLeastSum ? sum : kLeastSum) * 254.0f;
  return static_cast<std::int8_t>(std::bit_cast<std::uint32_t>(companded + kNearest) - kNearestBits);
}
constexpr float exp_avg_from_int8(std::int8_t code, float scale) {
  const auto q = static_cast<float>(code);
  return q / (254.0f - (q < 0 ? -q : q)) * scale;
}

// What a group's square roots are multiplied with to become codes, and the codes to become square roots.
constexpr float codes_a_root(float scale) { return 255.0f / (scale > kLeastRoot ? scale : kLeastRoot); }
constexpr float roots_a_code(float scale) { return scale / 255.0f; }

constexpr std::uint8_t root_to_uint8(float root, float codes_a_root, std::uint32_t random16) {
  const float code = root * codes_a_root + static_cast<float>(random16) * 0x1p-16f;
  if (!(code < 255.0f)) return 255;  // a NaN, too: converting it would be undefined
  const auto whole = static_cast<std::uint8_t>(code);
  return whole == 0 && root > 0 ? 1 : whole;
}
constexpr float exp_avg_sq_from_uint8(std::uint8_t code, float roots_a_code) {
  const float root = static_cast<float>(code) * roots_a_code;
  return root * root;
}

}  // namespace spillway
