// Every instruction set of this machine gives the same bits, bf16 is rounded as bf16.h says, and operands are packed as
// the layout says.
#include "tools/models/ops/vector_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "spillway/bf16.h"
#include "spillway/fp16.h"

namespace spillway::models {
namespace {

constexpr std::size_t kCount = 203;  // twelve groups of 16 and a tail of 11

float widened(std::uint16_t bits, DType type) {
  return type == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// Bytes of a tensor of any type, the same values in each.
std::vector<std::byte> tensor(DType type, std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<std::byte> bytes(count * size_of(type));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = bf16_to_float(float_to_bf16(normal(generator)));
    const std::uint16_t half = type == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    if (type == DType::kFloat32)
      std::memcpy(&bytes[4 * i], &value, 4);
    else
      std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}
std::vector<float> floats(std::size_t count, unsigned seed) {
  std::vector<float> out(count);
  const auto bytes = tensor(DType::kFloat32, count, seed);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// The whole of it, in tiles of 32 keys.
void softmax(const VectorKernels& k, float* scores, std::size_t rows, std::size_t first_key, std::size_t first_query,
             const std::uint32_t* lows, float scale) {
  std::vector<float> maximum(kPanel, -1e30f), sum(kPanel, 0.0f);
  const auto tiles = [&](const auto& body) {
    for (std::size_t r = 0; r < rows; r += 32) body(scores + r * kPanel, std::min<std::size_t>(32, rows - r), r);
  };
  tiles([&](float* tile, std::size_t count, std::size_t r) {
    k.hide(tile, count, first_key + r, first_query, lows);
    k.column_maximum(tile, count, maximum.data());
  });
  tiles([&](float* tile, std::size_t count, std::size_t) {
    k.column_exponentials(tile, count, maximum.data(), scale, sum.data());
  });
  for (float& s : sum) s = 1 / s;
  k.scale_columns(scores, rows, sum.data());
}

// Everything a table computes, one after the other, as bytes.
std::vector<std::byte> run_all(const VectorKernels& k, DType type) {
  std::vector<std::byte> all;
  const auto keep = [&](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    all.insert(all.end(), begin, begin + bytes);
  };
  const std::size_t e = size_of(type);
  const auto x = tensor(type, kCount, 1), w = tensor(type, kCount, 2), b = tensor(type, kCount, 3);
  std::vector<std::byte> y(kCount * e);
  const auto statistics = k.layer_norm(x.data(), w.data(), b.data(), y.data(), kCount, 1e-5f);
  keep(&statistics, sizeof(statistics));
  keep(y.data(), y.size());
  k.layer_norm_backward(x.data(), w.data(), b.data(), w.data(), y.data(), kCount, statistics);
  keep(y.data(), y.size());
  k.gelu(x.data(), y.data(), kCount);
  keep(y.data(), y.size());
  k.gelu_backward(x.data(), w.data(), y.data(), kCount);
  keep(y.data(), y.size());
  k.add(x.data(), w.data(), y.data(), kCount);
  keep(y.data(), y.size());
  k.scale(x.data(), 7.7459667f, y.data(), kCount);
  keep(y.data(), y.size());
  const float rstd = k.rms_norm(x.data(), w.data(), 1, y.data(), kCount, 1e-5f);
  keep(&rstd, sizeof(rstd));
  keep(y.data(), y.size());
  k.rms_norm_backward(x.data(), w.data(), 1, b.data(), w.data(), y.data(), kCount, rstd);
  keep(y.data(), y.size());
  auto second = b;
  for (std::size_t activation = 0; activation < 3; ++activation) {
    k.gated[activation](x.data(), w.data(), y.data(), kCount);
    keep(y.data(), y.size());
    k.gated_backward[activation](x.data(), w.data(), b.data(), y.data(), second.data(), kCount);
    keep(y.data(), y.size());
    keep(second.data(), second.size());
  }
  y = x;
  const auto angles = floats(2 * (kCount / 2), 7);
  for (const bool backward : {false, true}) {
    k.rotate(y.data(), angles.data(), kCount / 2, backward);
    keep(y.data(), y.size());
  }

  auto tile = floats(100 * kPanel, 4);
  auto other = floats(100 * kPanel, 5);
  std::vector<float> dots(kPanel, 0.5f);
  softmax(k, tile.data(), 100, 0, 30, nullptr, 0.3f);
  k.column_dots(tile.data(), other.data(), 100, dots.data());
  k.softmax_gradient(tile.data(), other.data(), 100, dots.data(), 0.3f);
  keep(tile.data(), tile.size() * 4);
  keep(other.data(), other.size() * 4);
  std::vector<std::uint32_t> lows(kPanel);
  for (std::uint32_t c = 0; c < kPanel; ++c) lows[c] = 130 + c / 20 * 18;
  auto masked = floats(100 * kPanel, 9), slopes = masked;
  k.soft_cap(masked.data(), 100, 0.7f, 3, slopes.data());
  softmax(k, masked.data(), 100, 128, 180, lows.data(), 0.3f);
  k.soft_cap_slopes(masked.data(), 10, 3, slopes.data());
  k.scale_tile(masked.data(), slopes.data(), 90, 0.9f);
  keep(masked.data(), masked.size() * 4);
  keep(slopes.data(), slopes.size() * 4);
  std::vector<float> maximum(kPanel), sum(kPanel), sums(kPanel, 0.5f), more(kPanel, 1.5f);
  k.column_statistics(other.data(), 100, maximum.data(), sum.data());
  k.column_probabilities(other.data(), 100, maximum.data(), 0.1f);
  keep(maximum.data(), kPanel * 4);
  keep(sum.data(), kPanel * 4);
  keep(other.data(), other.size() * 4);
  const auto matrix = tensor(type, 70 * 90, 6);
  k.column_sums(matrix.data(), 90, 70, 51, sums.data());
  const std::vector<LayerNormStatistics> rows(70, statistics);
  k.layer_norm_backward_columns(matrix.data(), matrix.data() + 20 * e, 90, 69, 51, rows.data(), sums.data(),
                                more.data());
  const auto row_statistics = floats(2 * 70, 9);
  k.rms_norm_backward_columns({matrix.data(), 90}, {matrix.data() + 20 * e, 85}, 69, 51, row_statistics.data(), 2,
                              sums.data());
  k.accumulate_scaled(matrix.data(), 0.3f, more.data(), 51);
  keep(sums.data(), kPanel * 4);
  keep(more.data(), kPanel * 4);
  std::vector<std::byte> stored(100 * kPanel * e);
  k.store_tile(tile.data(), 90, 51, w.data(), matrix.data(), stored.data(), 60);
  k.store_transposed(tile.data(), 37, 51, stored.data() + 50 * e, 40);
  keep(stored.data(), stored.size());
  return all;
}

class VectorKernelsTest : public testing::TestWithParam<DType> {};

TEST_P(VectorKernelsTest, AllInstructionSetsGiveTheSameBits) {
  const auto targets = vector_targets(GetParam());
  ASSERT_FALSE(targets.empty());
  const auto expected = run_all(vector_kernels(GetParam()), GetParam());
  for (const auto& target : targets) {
    EXPECT_TRUE(run_all(*target.kernels, GetParam()) == expected) << target.name;
  }
}

TEST_P(VectorKernelsTest, PanelsHoldTheOperandInTheirLayout) {
  const DType type = GetParam();
  const std::size_t e = size_of(type), stride = 130;
  const auto x = tensor(type, 120 * stride, 8);
  const auto value = [&](std::size_t row, std::size_t column) {
    if (type == DType::kFloat32) return reinterpret_cast<const float*>(x.data())[row * stride + column];
    return widened(reinterpret_cast<const std::uint16_t*>(x.data())[row * stride + column], type);
  };
  const auto in_panel = [&](const std::vector<std::byte>& panel, DType of, std::size_t k, std::size_t c) {
    if (of == DType::kFloat32) return reinterpret_cast<const float*>(panel.data())[k * kPanel + c];
    return widened(reinterpret_cast<const std::uint16_t*>(panel.data())[(k / 2 * kPanel + c) * 2 + k % 2], of);
  };
  for (const auto& target : vector_targets(type)) {
    for (const auto& [depth, columns] :
         {std::pair<std::size_t, std::size_t>{64, 64}, {37, 64}, {96, 5}, {1, 1}, {50, 33}}) {
      for (const bool wide : {false, true}) {
        const DType of = wide ? DType::kFloat32 : type;
        std::vector<std::byte> panel(padded_depth(depth) * kPanel * size_of(of), std::byte{0xff});
        auto transposed = panel;
        if (wide) {
          target.kernels->pack_widen(x.data() + 3 * e, stride, depth, columns, reinterpret_cast<float*>(panel.data()));
          target.kernels->pack_transposed_widen(x.data() + 3 * e, stride, depth, columns,
                                                reinterpret_cast<float*>(transposed.data()));
        } else {
          target.kernels->pack(x.data() + 3 * e, stride, depth, columns, panel.data());
          target.kernels->pack_transposed(x.data() + 3 * e, stride, depth, columns, transposed.data());
        }
        for (std::size_t k = 0; k < padded_depth(depth); ++k) {
          for (std::size_t c = 0; c < kPanel; ++c) {
            const bool inside = k < depth && c < columns;
            ASSERT_EQ(in_panel(panel, of, k, c), inside ? value(k, c + 3) : 0) << target.name << k << "," << c;
            ASSERT_EQ(in_panel(transposed, of, k, c), inside ? value(c, k + 3) : 0) << target.name << k << "," << c;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, VectorKernelsTest, testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(VectorKernelsTest, Bf16IsRoundedToNearestEvenAndNanStaysNan) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               1.0f,
                               1.00390625f,
                               1.01171875f,
                               3.4e38f,
                               -3.4e38f,
                               1e-40f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::bit_cast<float>(0x7fffffffu),
                               std::bit_cast<float>(0x7f800001u),
                               std::bit_cast<float>(0xffffffffu)};
  std::mt19937 generator(3);
  while (values.size() < 1003) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(generator())));
  for (const auto& target : vector_targets(DType::kBFloat16)) {
    std::vector<std::uint16_t> rounded(values.size());
    target.kernels->narrow(values.data(), rounded.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(rounded[i], float_to_bf16(values[i])) << target.name << i;
    std::vector<float> wide(values.size());
    target.kernels->widen(rounded.data(), wide.data(), wide.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), static_cast<std::uint32_t>(rounded[i]) << 16);
    }
  }
}

TEST(VectorKernelsTest, Fp16IsReadAndRoundedAsItsHeaderSays) {
  std::vector<std::uint16_t> halves(65'536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> values;
  for (const std::uint16_t half : halves) {  // with the tie after each, and what is beside it
    const auto bits = std::bit_cast<std::uint32_t>(fp16_to_float(half));
    for (const std::uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u})
      values.push_back(std::bit_cast<float>(bits + low));
  }
  std::mt19937 generator(3);
  for (int i = 0; i < 10'000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(generator())));
  for (const float x : {65519.99f, 65520.0f, 1e38f, 0x1p-25f, 0x1.000002p-25f, 1e-40f}) values.push_back(x);
  for (const auto& target : vector_targets(DType::kFloat16)) {
    std::vector<float> wide(halves.size());
    target.kernels->widen(halves.data(), wide.data(), halves.size());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(fp16_to_float(halves[i])))
          << target.name << " " << i;
    }
    std::vector<std::uint16_t> rounded(values.size());
    target.kernels->narrow(values.data(), rounded.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(rounded[i], float_to_fp16(values[i])) << target.name << " " << values[i];
    }
  }
}

// The bounds that vector_rows-inl.h names, and a few times fp32's last place for what is not gelu.
TEST(VectorKernelsTest, ActivationsAreWithinRoundingOfTheirFormulas) {
  const auto& k = vector_kernels(DType::kFloat32);
  std::vector<float> x;
  for (int i = -200'000; i <= 200'000; ++i) x.push_back(static_cast<float>(i) * 7e-5f);
  for (const float v : {1e-30f, 50.0f, 1e4f, 1e9f}) {
    x.push_back(v);
    x.push_back(-v);
  }
  const std::size_t count = x.size();
  const std::vector<float> one(count, 1.0f);
  std::vector<float> value(count), slope(count), up(count);
  const auto compute = [&](std::size_t activation) {
    k.gated[activation](x.data(), one.data(), value.data(), count);
    k.gated_backward[activation](x.data(), one.data(), one.data(), slope.data(), up.data(), count);
    EXPECT_EQ(up, value);
  };
  const auto near = [&](std::size_t i, double y, double dy) {
    ASSERT_NEAR(value[i], y, 2e-7 + std::abs(y) * 2e-7) << x[i];
    ASSERT_NEAR(slope[i], dy, 5e-7) << x[i];
  };
  compute(0);
  for (std::size_t i = 0; i < count; ++i) {
    const double v = x[i], s = 1 / (1 + std::exp(-v)), left = 1 / (1 + std::exp(v));  // left: 1 - s
    near(i, v * s, s * (1 + v * left));
  }
  compute(2);
  for (std::size_t i = 0; i < count; ++i) {
    const double v = x[i], phi = std::erfc(-v / std::sqrt(2)) / 2;
    near(i, v * phi, phi + v * std::exp(-v * v / 2) / std::sqrt(2 * M_PI));
  }
}

// A tile of rows from key 128 on and queries from 150 on, each with a first key of its own.
TEST(VectorKernelsTest, MaskedSoftmaxIsOfWhatEachColumnSees) {
  constexpr std::size_t kRows = 90, kFirstKey = 128, kFirstQuery = 150;
  std::vector<std::uint32_t> lows(kPanel);
  for (std::uint32_t c = 0; c < kPanel; ++c) {
    lows[c] = c < 16 ? 0 : c < 30 ? 131 : c < 40 ? 175 + c % 4 : static_cast<std::uint32_t>(kFirstQuery) + c;
  }
  const auto scores = floats(kRows * kPanel, 10);
  for (const auto& target : vector_targets(DType::kFloat32)) {
    auto tile = scores;
    softmax(*target.kernels, tile.data(), kRows, kFirstKey, kFirstQuery, lows.data(), 0.3f);
    for (std::size_t c = 0; c < kPanel; ++c) {
      const auto sees = [&](std::size_t r) { return kFirstKey + r >= lows[c] && kFirstKey + r <= kFirstQuery + c; };
      double sum = 0;
      for (std::size_t r = 0; r < kRows; ++r) sum += sees(r) ? std::exp(0.3f * double{scores[r * kPanel + c]}) : 0;
      for (std::size_t r = 0; r < kRows; ++r) {
        const double expected = sees(r) ? std::exp(0.3f * double{scores[r * kPanel + c]}) / sum : 0;
        const float result = tile[r * kPanel + c];
        // An exact zero where nothing is seen.
        ASSERT_NEAR(result, expected, 1e-6 * expected) << target.name << " " << r << "," << c;
      }
    }
  }
}

TEST(VectorKernelsTest, SoftCapIsTanhHoweverSmallOrLargeTheScores) {
  const float cap = 30, scale = 0.5f;
  std::vector<float> scores = {0, 1e-30f, 1e-6f, 37.4999f, 37.5f, 1e4f, 1e30f};
  std::mt19937 generator(4);
  std::normal_distribution<float> normal(0, 40);
  while (scores.size() < 2 * kPanel) scores.push_back(normal(generator));
  for (std::size_t i = 0; i < kPanel; ++i) scores[i + kPanel] = -scores[i];
  scores.back() = std::numeric_limits<float>::quiet_NaN();
  for (const auto& target : vector_targets(DType::kFloat32)) {
    std::vector<float> capped = scores, slopes(scores.size());
    target.kernels->soft_cap(capped.data(), 2, scale, cap, slopes.data());
    EXPECT_TRUE(std::isnan(capped.back()) && std::isnan(slopes.back())) << target.name;
    for (std::size_t i = 0; i + 1 < scores.size(); ++i) {
      const double t = std::tanh(double{scores[i]} * scale / cap);
      ASSERT_NEAR(capped[i], cap * t, 5e-7 * std::abs(cap * t)) << target.name << " " << scores[i];
      ASSERT_NEAR(slopes[i], 1 - t * t, 5e-7) << target.name << " " << scores[i];
    }
    std::vector<float> again = scores;
    target.kernels->soft_cap(again.data(), 2, scale, cap, nullptr);
    EXPECT_EQ(0, std::memcmp(again.data(), capped.data(), 4 * again.size())) << target.name;
    std::vector<float> later(scores.size());
    target.kernels->soft_cap_slopes(capped.data(), 2, cap, later.data());
    EXPECT_TRUE(std::isnan(later.back())) << target.name;
    for (std::size_t i = 0; i + 1 < scores.size(); ++i) ASSERT_NEAR(later[i], slopes[i], 5e-7) << target.name;
  }
}

// Against differences of the softmax, computed in double.
TEST(VectorKernelsTest, SoftmaxGradientIsItsSlope) {
  constexpr std::size_t kRows = 20;
  const auto scores = floats(kRows * kPanel, 11), upstream = floats(kRows * kPanel, 12);
  for (const auto& target : vector_targets(DType::kFloat32)) {
    const auto& k = *target.kernels;
    auto tile = scores, gradient = upstream;
    std::vector<float> dot(kPanel, 0.0f);
    softmax(k, tile.data(), kRows, 0, kRows, nullptr, 0.5f);
    k.column_dots(tile.data(), gradient.data(), kRows, dot.data());
    k.softmax_gradient(tile.data(), gradient.data(), kRows, dot.data(), 0.5f);
    for (std::size_t c = 0; c < kPanel; ++c) {
      double total = 0, mean = 0;
      const auto at = [&](const std::vector<float>& x, std::size_t r) { return double{x[r * kPanel + c]}; };
      for (std::size_t r = 0; r < kRows; ++r) total += std::exp(0.5 * at(scores, r));
      for (std::size_t r = 0; r < kRows; ++r) mean += std::exp(0.5 * at(scores, r)) / total * at(upstream, r);
      for (std::size_t r = 0; r < kRows; ++r) {
        const double p = std::exp(0.5 * at(scores, r)) / total, slope = 0.5 * p * (at(upstream, r) - mean);
        ASSERT_NEAR(at(tile, r), p, 1e-6) << target.name;
        ASSERT_NEAR(at(gradient, r), slope, 2e-6) << target.name;
      }
    }
  }
}

// An odd number of rows: a pair's second row is zeros, and so are rows up to a whole number of 32.
TEST(VectorKernelsTest, TilesArePackedAsTensorsAre) {
  const std::size_t rows = 37;
  const auto tile = floats(rows * kPanel, 13);
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& target : vector_targets(type)) {
      const std::size_t e = size_of(type), packed = padded_depth(rows) * kPanel * e;
      std::vector<std::byte> by_row(rows * kPanel * e), panel(packed), expected_rows(by_row), expected(packed);
      target.kernels->pack_tile(tile.data(), rows, by_row.data(), panel.data());
      target.kernels->narrow(tile.data(), expected_rows.data(), rows * kPanel);
      target.kernels->pack(expected_rows.data(), kPanel, rows, kPanel, expected.data());
      EXPECT_EQ(by_row, expected_rows) << target.name;
      EXPECT_EQ(panel, expected) << target.name;
    }
  }
}

TEST(VectorKernelsTest, NanReachesTheResult) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto& k = vector_kernels(DType::kFloat32);
  std::vector<float> tile(8 * kPanel, 0.5f), x(20, 1.0f), y(20);
  tile[3 * kPanel + 7] = nan;
  softmax(k, tile.data(), 8, 0, 0, nullptr, 1.0f);
  EXPECT_TRUE(std::isnan(tile[7]));
  EXPECT_FALSE(std::isnan(tile[8]));
  // Of what is seen alone.
  std::vector<float> masked(8 * kPanel, 0.5f);
  for (const std::size_t c : {7, 9}) masked[3 * kPanel + c] = nan;
  std::vector<std::uint32_t> lows(kPanel, 0);
  lows[9] = 4;
  softmax(k, masked.data(), 8, 0, 0, lows.data(), 1.0f);
  for (std::size_t r = 0; r < 8; ++r) EXPECT_TRUE(std::isnan(masked[r * kPanel + 7])) << r;
  for (std::size_t r = 0; r < 8; ++r) EXPECT_EQ(masked[r * kPanel + 9], r < 4 ? 0 : 0.25f) << r;
  x[18] = nan;
  k.gelu(x.data(), y.data(), 20);
  EXPECT_TRUE(std::isnan(y[18]));
  EXPECT_FALSE(std::isnan(y[17]));
  const std::vector<float> one(20, 1.0f);
  for (const auto gated : k.gated) {
    gated(x.data(), one.data(), y.data(), 20);
    EXPECT_TRUE(std::isnan(y[18]));
    EXPECT_FALSE(std::isnan(y[17]));
  }
}

}  // namespace
}  // namespace spillway::models
