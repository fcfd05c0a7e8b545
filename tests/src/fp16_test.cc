#include "src/fp16.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

TEST(Fp16, All65536PatternsWidenAsTheCompilersOwnTypeDoes) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits));
    const auto expected = std::bit_cast<std::uint32_t>(static_cast<float>(half));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(fp16_to_float(static_cast<std::uint16_t>(bits))), expected) << bits;
  }
}

}  // namespace
}  // namespace spillway
