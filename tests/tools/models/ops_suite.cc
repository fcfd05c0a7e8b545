// The operations of every device against plain double-precision loops. Inputs are values of the tensor type, so the
// reference sees the same numbers; fp32 results may differ by fp32 sums, 16-bit results also by one rounding.
#include "tests/tools/models/ops_suite.h"

#include <cstdlib>
#include <utility>

namespace spillway::models {
namespace {

TEST_P(OpsTest, EmbeddingAddsTokenAndPositionRows) {
  const std::size_t m = tokens(), width = shape().width;
  // Half of the places hold one of five tokens: rows of the table are hit many times.
  auto ids = random_.tokens(m, shape().vocabulary);
  for (std::size_t i = 0; i < m; i += 2) ids[i] %= 5;
  const auto wte = random_.values(shape().vocabulary * width), wpe = random_.values(shape().positions * width);
  std::byte* out = bench_->output(m * width);
  const auto* device_ids = bench_->tokens(ids);
  bench_->run(Embedding{device_ids, bench_->tensor(wte), bench_->tensor(wpe), out});
  Doubles expected(m * width);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t c = 0; c < width; ++c) {
      expected[i * width + c] = wte[ids[i] * width + c] + wpe[i % shape().sequence * width + c];
    }
  }
  close(out, expected, 1e-6, "embedding");

  const auto dout = random_.values(m * width);
  Doubles dwte(shape().vocabulary * width, 0.5), dwpe(shape().positions * width, -0.25);
  float *dwte_device = bench_->fp32_tensor(dwte), *dwpe_device = bench_->fp32_tensor(dwpe);
  bench_->run(EmbeddingBackward{device_ids, bench_->tensor(dout), dwte_device, dwpe_device});
  // The same additions in the order of the tokens: the same bits.
  std::vector<float> dwte_sum(dwte.begin(), dwte.end()), dwpe_sum(dwpe.begin(), dwpe.end());
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t c = 0; c < width; ++c) {
      dwte_sum[ids[i] * width + c] += static_cast<float>(dout[i * width + c]);
      dwpe_sum[i % shape().sequence * width + c] += static_cast<float>(dout[i * width + c]);
    }
  }
  EXPECT_EQ(bench_->read(dwte_device, dwte.size(), DType::kFloat32), Doubles(dwte_sum.begin(), dwte_sum.end()));
  EXPECT_EQ(bench_->read(dwpe_device, dwpe.size(), DType::kFloat32), Doubles(dwpe_sum.begin(), dwpe_sum.end()));
}

void check_layer_norm(Bench& bench, Random& random) {
  const Shape& shape = bench.shape;
  const std::size_t m = shape.tokens(), width = shape.width;
  const auto x = random.values(m * width, 2);
  const auto weight = random.values(width), bias = random.values(width), dout = random.values(m * width);
  const auto residual = random.values(m * width);
  const auto* x_device = bench.tensor(x);
  const auto *w_device = bench.tensor(weight), *dout_device = bench.tensor(dout);
  std::byte* out = bench.output(m * width);
  float* statistics = bench.floats(2 * m);
  bench.run(LayerNorm{x_device, w_device, bench.tensor(bias), out, statistics});
  std::byte* dx = bench.tensor(residual);
  Doubles dw(width, 1.0), db(width, 2.0);
  float *dw_device = bench.fp32_tensor(dw), *db_device = bench.fp32_tensor(db);
  // As a layer's gradients are: not summed, in the tensor type, and with dx over nothing else.
  std::byte *dx_own = bench.output(m * width), *dw_own = bench.output(width), *db_own = bench.output(width);
  bench.run(LayerNormBackward{x_device, w_device, dout_device, statistics, nullptr, dx_own, dw_own, db_own, shape.type,
                              false});
  bench.run(LayerNormBackward{x_device, w_device, dout_device, statistics, dx, dx, dw_device, db_device,
                              DType::kFloat32, true});
  Doubles y(m * width), d(m * width), d_own(m * width), dw_sum(width, 0.0), db_sum(width, 0.0);
  const double n = static_cast<double>(width);
  for (std::size_t i = 0; i < m; ++i) {
    double mean = 0, variance = 0, mean_g = 0, mean_gn = 0;
    for (std::size_t c = 0; c < width; ++c) mean += x[i * width + c] / n;
    for (std::size_t c = 0; c < width; ++c) variance += std::pow(x[i * width + c] - mean, 2) / n;
    const double rstd = 1 / std::sqrt(variance + shape.epsilon);
    for (std::size_t c = 0; c < width; ++c) {
      const double normalized = (x[i * width + c] - mean) * rstd, g = dout[i * width + c] * weight[c];
      y[i * width + c] = normalized * weight[c] + bias[c];
      mean_g += g / n;
      mean_gn += g * normalized / n;
      dw_sum[c] += dout[i * width + c] * normalized;
      db_sum[c] += dout[i * width + c];
    }
    for (std::size_t c = 0; c < width; ++c) {
      const double normalized = (x[i * width + c] - mean) * rstd, g = dout[i * width + c] * weight[c];
      d_own[i * width + c] = rstd * (g - mean_g - normalized * mean_gn);
      d[i * width + c] = d_own[i * width + c] + residual[i * width + c];
    }
  }
  const auto close = [&](const void* memory, const Doubles& expected, DType type, const char* what) {
    expect_close(bench.read(memory, expected.size(), type), expected, type, 1e-5, what);
  };
  close(out, y, shape.type, "y");
  close(dx, d, shape.type, "dx");
  close(dx_own, d_own, shape.type, "dx alone");
  close(dw_own, dw_sum, shape.type, "dweight in the tensor type");
  close(db_own, db_sum, shape.type, "dbias in the tensor type");
  for (std::size_t c = 0; c < width; ++c) {
    dw[c] += dw_sum[c];
    db[c] += db_sum[c];
  }
  close(dw_device, dw, DType::kFloat32, "dweight");
  close(db_device, db, DType::kFloat32, "dbias");
}

TEST_P(OpsTest, LayerNormNormalizesRowsAndItsGradientSumsToZero) { check_layer_norm(*bench_, random_); }

TEST_P(OpsTest, LinearAndItsGradientsAreMatrixProducts) {
  const std::size_t m = tokens(), in = shape().inner, out = shape().width;
  const auto x = random_.values(m * in), weight = random_.values(in * out), bias = random_.values(out);
  const auto residual = random_.values(m * out), dy = random_.values(m * out);
  const auto *x_device = bench_->tensor(x), *w_device = bench_->tensor(weight), *dy_device = bench_->tensor(dy);
  std::byte* y = bench_->output(m * out);
  const auto in32 = static_cast<std::uint32_t>(in), out32 = static_cast<std::uint32_t>(out);
  bench_->run(Linear{in32, out32, x_device, w_device, bench_->tensor(bias), bench_->tensor(residual), y});
  auto expected = product(
      m, out, in, [&](auto i, auto k) { return x[i * in + k]; }, [&](auto k, auto j) { return weight[k * out + j]; });
  const Doubles before = rounded_before_bias(expected, {in, out});
  Doubles sums = before;  // with the residual, which may be added before the bias
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = std::abs(before[i]) + std::abs(before[i] + residual[i]);
  for (std::size_t i = 0; i < m * out; ++i) expected[i] += bias[i % out] + residual[i];
  close(y, expected, tolerances().product, "y", sums);

  std::byte* y_alone = bench_->output(m * out);
  bench_->run(Linear{in32, out32, x_device, w_device, bench_->tensor(bias), nullptr, y_alone});
  for (std::size_t i = 0; i < m * out; ++i) expected[i] -= residual[i];
  close(y_alone, expected, tolerances().product, "y without a residual", before);

  std::byte* dx = bench_->output(m * in);
  bench_->run(LinearBackwardInput{in32, out32, dy_device, w_device, dx});
  close(dx,
        product(
            m, in, out, [&](auto i, auto k) { return dy[i * out + k]; },
            [&](auto k, auto j) { return weight[j * out + k]; }),
        tolerances().product, "dx");

  auto dw = product(
      in, out, m, [&](auto i, auto k) { return x[k * in + i]; }, [&](auto k, auto j) { return dy[k * out + j]; });
  Doubles db(out, 0.0);
  for (std::size_t i = 0; i < m * out; ++i) db[i % out] += dy[i];
  std::byte *dw_own = bench_->output(in * out), *db_own = bench_->output(out);
  bench_->run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_own, db_own, shape().type, false});
  close(dw_own, dw, tolerances().product, "dweight in the tensor type");
  close(db_own, db, tolerances().product, "dbias in the tensor type");

  float *dw_sum = bench_->floats(in * out), *db_sum = bench_->floats(out);
  bench_->run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_sum, db_sum, DType::kFloat32, false});
  bench_->run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_sum, db_sum, DType::kFloat32, true});
  for (auto& v : dw) v *= 2;
  for (auto& v : db) v *= 2;
  close_fp32(dw_sum, dw, tolerances().product, "sum of dweight");
  close_fp32(db_sum, db, tolerances().product, "sum of dbias");
}

// Products that copy columns, so that what gelu sees is known exactly.
Doubles copying_weight(std::size_t from, std::size_t to) {
  Doubles weight(from * to, 0.0);
  for (std::size_t j = 0; j < to; ++j) weight[j % from * to + j] = 1;
  return weight;
}

TEST_P(OpsTest, GeluIsTheTanhForm) {
  const std::size_t m = tokens(), width = shape().width, inner = shape().inner;
  const auto width32 = static_cast<std::uint32_t>(width), inner32 = static_cast<std::uint32_t>(inner);
  const auto drawn = [&](std::size_t count) {
    Doubles x = random_.values(count, 3);
    const float special[] = {0, -0.0f, 1e-3f, -1e-3f, 30, -30, 100, -100};
    for (std::size_t i = 0; i < 8; ++i) x[i] = FakeEngine::rounded(special[i], shape().type);  // 1e-3 is no bf16
    return x;
  };
  const double k = std::sqrt(2 / M_PI);
  const auto hyperbolic = [&](double x) { return std::tanh(k * (x + 0.044715 * x * x * x)); };

  const auto x = drawn(m * width);
  std::byte *before = bench_->output(m * inner), *after = bench_->output(m * inner);
  bench_->run(LinearGelu{width32, inner32, bench_->tensor(x), bench_->tensor(copying_weight(width, inner)),
                         bench_->tensor(Doubles(inner, 0.0)), before, after});
  Doubles argument(m * inner), expected(m * inner);
  for (std::size_t i = 0; i < m * inner; ++i) {
    argument[i] = x[i / inner * width + i % inner % width];
    expected[i] = 0.5 * argument[i] * (1 + hyperbolic(argument[i]));
  }
  EXPECT_EQ(bench_->read(before, m * inner), argument);
  close(after, expected, tolerances().gelu, "gelu");

  const auto seen = drawn(m * inner), dy = random_.values(m * width);
  Doubles weight(inner * width, 0.0), derivative(m * inner);
  for (std::size_t i = 0; i < inner; ++i) weight[i * width + i % width] = 1;
  std::byte* dx = bench_->output(m * inner);
  bench_->run(
      LinearBackwardInput{inner32, width32, bench_->tensor(dy), bench_->tensor(weight), dx, bench_->tensor(seen)});
  for (std::size_t i = 0; i < m * inner; ++i) {
    const double v = seen[i], t = hyperbolic(v);
    const double slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * k * (1 + 3 * 0.044715 * v * v);
    derivative[i] = dy[i / inner * width + i % inner % width] * slope;
  }
  // Around |x| = 3 an error in the last place of u is multiplied by x^3.
  close(dx, derivative, tolerances().gelu_backward, "gelu backward");
}

TEST_P(OpsTest, GeluFollowsTheProductWithItsBias) {
  const std::size_t m = tokens(), in = shape().width, out = shape().inner;
  const auto x = random_.values(m * in), weight = random_.values(in * out, 0.2), bias = random_.values(out);
  std::byte *before = bench_->output(m * out), *after = bench_->output(m * out);
  bench_->run(LinearGelu{static_cast<std::uint32_t>(in), static_cast<std::uint32_t>(out), bench_->tensor(x),
                         bench_->tensor(weight), bench_->tensor(bias), before, after});
  auto expected = product(
      m, out, in, [&](auto i, auto k) { return x[i * in + k]; }, [&](auto k, auto j) { return weight[k * out + j]; });
  Doubles rounded = rounded_before_bias(expected, {in, out});
  for (std::size_t i = 0; i < m * out; ++i) expected[i] += bias[i % out];
  close(before, expected, tolerances().product, "before", rounded);
  // Of what was rounded or of what was not: apart by a rounding of the argument.
  const double rounding = size_of(shape().type) == 4 ? 0 : shape().type == DType::kBFloat16 ? 0x1p-7 : 0x1p-10;
  for (auto& v : expected) v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  for (auto& v : rounded) v *= 1.13;  // gelu's steepest slope
  close(after, expected, tolerances().gelu + rounding, "after", rounded);
}

TEST_P(OpsTest, HostMemoryGoesUpAndDown) {
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  constexpr std::size_t kBytes = 8192, kHalf = kBytes / 2;
  const std::unique_ptr<std::byte, Free> memory(static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)));
  // Operations of its own, for they must end before the memory.
  Bench bench(shape(), variant(), 1);
  Ops& ops = bench.machine->ops();
  ops.register_host({memory.get(), kBytes});
  for (std::size_t i = 0; i < kBytes; ++i) memory.get()[i] = static_cast<std::byte>(i < kHalf ? i * 7 : 1);
  std::byte* device = bench.machine->allocate(kHalf);
  ops.upload(memory.get(), device, kHalf, bench.machine->stream());
  ops.zero(device + 1000, 100, bench.machine->stream());
  ops.download(device, memory.get() + kHalf, kHalf, bench.machine->stream());
  bench.machine->stream().synchronize();
  for (std::size_t i = 0; i < kHalf; ++i) {
    const bool zeroed = i >= 1000 && i < 1100;
    ASSERT_EQ(memory.get()[kHalf + i], zeroed ? std::byte{0} : static_cast<std::byte>(i * 7)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, OpsTest,
                         testing::Combine(testing::ValuesIn(ops_variants()),
                                          testing::Values(NamedShape{"odd", odd_shape}, NamedShape{"even", even_shape},
                                                          NamedShape{"uneven", uneven_shape})),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
                         });

INSTANTIATE_TEST_SUITE_P(Variants, OpsOfSizeTest, testing::ValuesIn(ops_variants()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(OpsOfSizeTest, LayerNormTakesWideRows) {
  for (const Shape& shape : wide_shapes(GetParam().type)) {
    SCOPED_TRACE(shape.width);
    Bench bench(shape, GetParam(), 2);
    Random random(shape.type);
    check_layer_norm(bench, random);
  }
}

class OpsDeathTest : public OpsOfSizeTest {};
INSTANTIATE_TEST_SUITE_P(Variants, OpsDeathTest, testing::Values(ops_variants().front()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(OpsDeathTest, PointersOutsideTheArenaAreRefused) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Bench bench(even_shape(GetParam().type), GetParam(), 1);
  const std::size_t elements = bench.shape.tokens() * bench.shape.width;
  std::vector<float> outside(elements);
  std::byte* inside = bench.output(elements);
  float* statistics = bench.floats(2 * bench.shape.tokens());
  EXPECT_DEATH(bench.run(LayerNorm{outside.data(), inside, inside, inside, statistics}), "inside the HBM arena only");
  EXPECT_DEATH(bench.run(LayerNorm{inside, inside, inside, outside.data(), statistics}), "inside the HBM arena only");
}

}  // namespace
}  // namespace spillway::models
