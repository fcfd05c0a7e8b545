#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/workers.h"
#include "spillway/bf16.h"
#include "spillway/fp16.h"
#include "spillway/units.h"
#include "tests/kernels/host_float_settings.h"
#include "tests/kernels/random.h"
#include "tests/kernels/simd_targets.h"

namespace spillway {
namespace {

// The definition, one element at a time.
double defined_norm(const std::vector<float>& data, std::size_t first, std::size_t count) {
  double sum = 0;
  for (std::size_t leaf = 0; leaf < count; leaf += 1024) {
    double accumulators[16] = {};
    for (std::size_t i = leaf; i < std::min(count, leaf + 1024); ++i) {
      const double x = data[first + i];
      accumulators[i % 16] = accumulators[i % 16] + x * x;
    }
    for (int j = 0; j < 8; ++j) accumulators[j] += accumulators[j + 8];
    for (int j = 0; j < 4; ++j) accumulators[j] += accumulators[j + 4];
    for (int j = 0; j < 2; ++j) accumulators[j] += accumulators[j + 2];
    sum += accumulators[0] + accumulators[1];
  }
  return sum;
}

class NormOfWorkers : public testing::TestWithParam<unsigned> {
 protected:
  NormResult norm(const void* data, DType type, std::size_t count) {
    leaves_.assign(div_up(count, kNormLeaf), -1);
    return squared_norm(data, type, count, leaves_, *workers_);
  }
  std::unique_ptr<HostWorkers> workers_ = create_workers(GetParam());
  std::vector<double> leaves_;
};
INSTANTIATE_TEST_SUITE_P(Threads, NormOfWorkers, testing::Values(1, 2, 5));

TEST_P(NormOfWorkers, HasTheBitsOfTheDefinitionAtAnyLengthAndOffset) {
  auto generator = seeded_generator();
  OddFloats odd(generator);
  std::vector<float> data32(300'100);
  std::vector<std::uint16_t> data16(data32.size());
  std::vector<float> widened(data32.size()), from_half(data32.size());
  std::vector<std::uint16_t> half(data32.size());
  for (std::size_t i = 0; i < data32.size(); ++i) {
    data32[i] = odd();
    data16[i] = float_to_bf16(data32[i]);
    widened[i] = bf16_to_float(data16[i]);
    do half[i] = static_cast<std::uint16_t>(generator());
    while (!std::isfinite(fp16_to_float(half[i])));
    from_half[i] = fp16_to_float(half[i]);
  }
  std::vector<std::size_t> counts = {0, 1023, 1024, 1025, 2048, 65'535, 65'536, 65'537, 131'072, 200'001, 300'000};
  for (std::size_t count = 1; count < 50; ++count) counts.push_back(count);
  for_each_simd_target([&] {
    for (std::size_t count : counts) {
      const std::size_t first = count % 7;
      const NormResult fp32 = norm(data32.data() + first, DType::kFloat32, count);
      EXPECT_EQ(std::bit_cast<std::uint64_t>(fp32.sum_of_squares),
                std::bit_cast<std::uint64_t>(defined_norm(data32, first, count)))
          << count;
      EXPECT_EQ(fp32.first_nonfinite, kAllFinite);
      const NormResult bf16 = norm(data16.data() + first, DType::kBFloat16, count);
      EXPECT_EQ(std::bit_cast<std::uint64_t>(bf16.sum_of_squares),
                std::bit_cast<std::uint64_t>(defined_norm(widened, first, count)))
          << count;
      const NormResult fp16 = norm(half.data() + first, DType::kFloat16, count);
      EXPECT_EQ(std::bit_cast<std::uint64_t>(fp16.sum_of_squares),
                std::bit_cast<std::uint64_t>(defined_norm(from_half, first, count)))
          << count;
      EXPECT_EQ(fp16.first_nonfinite, kAllFinite);
    }
  });
}

TEST_P(NormOfWorkers, LargestValuesDoNotOverflow) {
  const std::vector<float> data(70'000, std::numeric_limits<float>::max());
  EXPECT_EQ(norm(data.data(), DType::kFloat32, data.size()).first_nonfinite, kAllFinite);
}

TEST_P(NormOfWorkers, FindsTheFirstLeafWithANonFiniteElement) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> data(140'000, 1.0f);
  std::vector<std::uint16_t> data16(data.size(), float_to_bf16(1.0f)), half(data.size(), float_to_fp16(1.0f));
  for (float bad : {inf, -inf, nan}) {
    for (std::size_t at : {0, 1, 15, 1023, 1024, 65'535, 65'536, 139'999}) {
      data[at] = bad, data[139'999] = nan;
      data16[at] = float_to_bf16(bad), data16[139'999] = float_to_bf16(nan);
      const std::size_t leaf = align_down(at, kNormLeaf);
      EXPECT_EQ(norm(data.data(), DType::kFloat32, data.size()).first_nonfinite, leaf);
      EXPECT_EQ(norm(data16.data(), DType::kBFloat16, data.size()).first_nonfinite, leaf);
      half[at] = float_to_fp16(bad), half[139'999] = float_to_fp16(nan);
      EXPECT_EQ(norm(half.data(), DType::kFloat16, data.size()).first_nonfinite, leaf);
      half[at] = half[139'999] = float_to_fp16(1.0f);
      data[at] = data[139'999] = 1, data16[at] = data16[139'999] = float_to_bf16(1.0f);
    }
  }
  EXPECT_EQ(norm(data.data(), DType::kFloat32, data.size()).sum_of_squares, 140'000.0);
}

TEST_P(NormOfWorkers, FlushToZeroOfTheHostProgramChangesNoBits) {
  const std::vector<float> data(5'000, 1e-40f);  // subnormal: read as zero under DAZ
  const FloatSettings saved = float_settings();
  set_float_settings(saved | kHostFloatSettings);
  const double sum = norm(data.data(), DType::kFloat32, data.size()).sum_of_squares;
  set_float_settings(saved);
  EXPECT_EQ(sum, defined_norm(data, 0, data.size()));
  EXPECT_GT(sum, 0);
}

TEST(NormDeathTest, RefusesTooLittleScratch) {
  const auto workers = create_workers(1);
  const std::vector<float> data(1025);
  std::vector<double> leaves(1);
  EXPECT_DEATH(squared_norm(data.data(), DType::kFloat32, 1025, leaves, *workers), "scratch for every leaf");
}

}  // namespace
}  // namespace spillway
