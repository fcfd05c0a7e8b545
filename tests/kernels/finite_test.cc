#include "kernels/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "spillway/bf16.h"
#include "spillway/fp16.h"

namespace spillway {
namespace {

TEST(AllFinite, AreThoseWithoutNanAndInf) {
  std::vector<float> data(9001, std::numeric_limits<float>::max());
  std::vector<std::uint16_t> data16(data.size(), 0xff7f), half(data.size(), 0xfbff);  // the least that is finite
  const auto finite = [&] {
    const bool found = all_finite(data.data() + 1, DType::kFloat32, 9000);
    EXPECT_EQ(found, all_finite(data16.data() + 1, DType::kBFloat16, 9000));
    EXPECT_EQ(found, all_finite(half.data() + 1, DType::kFloat16, 9000));
    return found;
  };
  EXPECT_TRUE(finite());
  EXPECT_TRUE(all_finite(nullptr, DType::kFloat32, 0));
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("1")}) {
    for (const std::size_t at : {1, 2, 17, 4096, 4097, 8999, 9000}) {
      const float kept = std::exchange(data[at], bad);
      const auto kept16 = std::exchange(data16[at], float_to_bf16(bad)),
                 kept_half = std::exchange(half[at], float_to_fp16(bad));
      EXPECT_FALSE(finite()) << bad << " at " << at;
      data[at] = kept, data16[at] = kept16, half[at] = kept_half;
    }
  }
  data[0] = HUGE_VALF;  // before the first
  EXPECT_TRUE(finite());
}

}  // namespace
}  // namespace spillway
