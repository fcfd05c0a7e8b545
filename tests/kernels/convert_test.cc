#include "kernels/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/fp16.h"
#include "tests/kernels/host_float_settings.h"
#include "tests/kernels/random.h"
#include "tests/kernels/simd_targets.h"

namespace spillway {
namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// The value of an fp16 pattern, from the format's definition (IEEE 754 binary16).
double fp16_value(std::uint16_t pattern) {
  const double sign = pattern & 0x8000 ? -1 : 1;
  const int exponent = pattern >> 10 & 31, mantissa = pattern & 1023;
  if (exponent == 31) return mantissa ? std::nan("") : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

std::vector<float> odd_floats(std::size_t count) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  std::vector<float> values(count);
  for (float& x : values) x = odd();
  return values;
}

TEST(Cast, EveryFp16PatternBecomesItsValue) {
  std::vector<std::uint16_t> from(65'536);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i);
  for_each_simd_target([&] {
    std::vector<float> to(from.size());
    std::vector<std::uint16_t> to16(from.size());
    cast(to.data(), DType::kFloat32, from.data(), DType::kFloat16, from.size());
    cast(to16.data(), DType::kBFloat16, from.data(), DType::kFloat16, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      const double value = fp16_value(from[i]);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(to[i])) << i;
        ASSERT_NE(bits(to[i]) & 0x400000u, 0u) << "quiet " << i;
      } else {
        ASSERT_EQ(bits(to[i]), bits(static_cast<float>(value))) << i;
      }
      ASSERT_EQ(to16[i], float_to_bf16(to[i])) << i;
    }
  });
}

TEST(Cast, EveryBf16PatternIsWidenedExactly) {
  std::vector<std::uint16_t> from(65'536);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i);
  for_each_simd_target([&] {
    std::vector<float> to(from.size());
    cast(to.data(), DType::kFloat32, from.data(), DType::kBFloat16, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) ASSERT_EQ(bits(to[i]), i << 16) << i;
  });
}

TEST(Cast, Fp32ToBf16RoundsAsTheScalarDefinition) {
  std::vector<float> from = odd_floats(100'000);
  // All mantissas around a tie, for even and odd neighbours, and every special number.
  for (std::uint32_t top : {0x3f80u, 0x3f81u, 0x0000u, 0x8000u, 0x7f7fu, 0xff7fu, 0x7f80u, 0xff80u, 0x7fffu})
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      from.push_back(std::bit_cast<float>(top << 16 | low));
  for_each_simd_target([&] {
    std::vector<std::uint16_t> to(from.size());
    cast(to.data(), DType::kBFloat16, from.data(), DType::kFloat32, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], float_to_bf16(from[i])) << std::hex << bits(from[i]);
  });
}

TEST(Cast, Fp32ToFp16RoundsAsTheScalarDefinition) {
  std::vector<float> from = odd_floats(100'000);
  // Every fp16 number, and its neighbours at and beside the tie with the next one; beyond the largest, and specials.
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const std::uint32_t u = bits(fp16_to_float(static_cast<std::uint16_t>(half)));
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu})
      from.push_back(std::bit_cast<float>(u + low));
  }
  for (float x : {65503.99f, 65519.99f, 65520.0f, 65521.0f, 1e38f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f, 1e-40f})
    from.insert(from.end(), {x, -x});
  for_each_simd_target([&] {
    std::vector<std::uint16_t> to(from.size());
    cast(to.data(), DType::kFloat16, from.data(), DType::kFloat32, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], float_to_fp16(from[i])) << std::hex << bits(from[i]);
  });
}

TEST(Cast, EveryBf16PatternIsRoundedToFp16) {
  std::vector<std::uint16_t> from(65'536);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i);
  for_each_simd_target([&] {
    std::vector<std::uint16_t> to(from.size());
    cast(to.data(), DType::kFloat16, from.data(), DType::kBFloat16, from.size());
    for (std::size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], float_to_fp16(bf16_to_float(from[i]))) << i;
  });
}

TEST(Cast, AnyLengthWritesNothingBesideIt) {
  const std::vector<float> from = odd_floats(64);
  for_each_simd_target([&] {
    for (std::size_t first = 0; first < 5; ++first) {
      for (std::size_t count = 0; first + count < 60; ++count) {
        std::vector<std::uint16_t> to(64, 0xabcd);
        cast(to.data() + first, DType::kBFloat16, from.data() + first, DType::kFloat32, count);
        for (std::size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= first && i < first + count;
          ASSERT_EQ(to[i], inside ? float_to_bf16(from[i]) : 0xabcd) << first << " " << count << " " << i;
        }
      }
    }
  });
}

TEST(Cast, TheSameTypeIsCopied) {
  const std::vector<std::uint16_t> from = {0x7c01, 1, 2};  // a signalling fp16 NaN stays as it is
  std::vector<std::uint16_t> to(3);
  cast(to.data(), DType::kFloat16, from.data(), DType::kFloat16, 3);
  EXPECT_EQ(to, from);
}

TEST(Accumulate, AddsInFp32AfterTheFirst) {
  const std::vector<float> start = odd_floats(4'103), more = odd_floats(4'103);
  std::vector<std::uint16_t> more16(more.size()), half(more.size());
  for (std::size_t i = 0; i < more.size(); ++i) {
    more16[i] = float_to_bf16(more[i]);
    half[i] = static_cast<std::uint16_t>(i % 0x7c00);  // finite
  }
  for_each_simd_target([&] {
    std::vector<float> sum(start.size(), -1);
    accumulate(sum.data(), start.data(), DType::kFloat32, sum.size(), true);
    accumulate(sum.data(), more.data(), DType::kFloat32, sum.size(), false);
    accumulate(sum.data(), more16.data(), DType::kBFloat16, sum.size(), false);
    accumulate(sum.data(), half.data(), DType::kFloat16, sum.size(), false);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      float expected = start[i] + more[i];
      expected = expected + bf16_to_float(more16[i]);
      expected = expected + static_cast<float>(fp16_value(half[i]));
      ASSERT_EQ(bits(sum[i]), bits(expected)) << i;
    }
    accumulate(sum.data(), more16.data(), DType::kBFloat16, sum.size(), true);
    for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(bits(sum[i]), bits(bf16_to_float(more16[i])));
  });
}

TEST(Accumulate, FlushToZeroOfTheHostProgramChangesNoBits) {
  std::vector<float> sum(100, 1e-40f);
  const std::vector<float> more(100, 2e-40f);
  const FloatSettings saved = float_settings();
  set_float_settings(saved | kHostFloatSettings);
  accumulate(sum.data(), more.data(), DType::kFloat32, sum.size(), false);
  set_float_settings(saved);
  for (float x : sum) EXPECT_EQ(bits(x), bits(1e-40f + 2e-40f));
}

}  // namespace
}  // namespace spillway
