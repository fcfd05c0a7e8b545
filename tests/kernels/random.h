// Random input for the tests of kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <random>

#include "tests/seed.h"

namespace spillway {

inline std::mt19937_64 seeded_generator() { return std::mt19937_64(test_seed()); }

// Every kind of finite number that arithmetic treats in its own way.
class OddFloats {
 public:
  explicit OddFloats(std::mt19937_64& generator) : generator_(generator) {}

  float operator()() {
    const auto sign = static_cast<std::uint32_t>(generator_() & 1) << 31;
    const auto mantissa = static_cast<std::uint32_t>(generator_()) & 0x7fffffu;
    const auto with_exponent = [&](std::uint32_t lowest, std::uint32_t span) {
      return std::bit_cast<float>(sign | (lowest + static_cast<std::uint32_t>(generator_() % span)) << 23 | mantissa);
    };
    switch (generator_() % 8) {
      case 0: return std::bit_cast<float>(sign);                   // ±0
      case 1: return std::bit_cast<float>(sign | mantissa);        // subnormal
      case 2: return std::bit_cast<float>(sign | (mantissa & 3));  // the smallest
      case 3: return with_exponent(1, 30);                         // tiny: products and squares underflow
      case 4: return with_exponent(170, 19);                       // huge: squares stay just below the limit
      default: return with_exponent(110, 24);                      // around 1
    }
  }

 private:
  std::mt19937_64& generator_;
};

}  // namespace spillway
