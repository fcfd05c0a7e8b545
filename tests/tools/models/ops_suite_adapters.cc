// Continues ops_suite.cc: what low-rank adapters over frozen weights need.
#include <array>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

constexpr std::uint32_t kRank = 5;

Shape with_adapters(Shape shape) {
  shape.adapter_rank = kRank;
  return shape;
}

TEST_P(OpsTest, AdaptersHaveProductsOfAFewColumns) {
  Bench bench(with_adapters(shape()), variant(), 2);
  const std::size_t m = tokens(), in = shape().width, out = shape().inner;
  const auto x = random_.values(m * in), down = random_.values(kRank * in), up = random_.values(out * kRank);
  const auto y = random_.values(m * out), dy = random_.values(m * out), dx = random_.values(m * in);
  const auto width = static_cast<std::uint32_t>(in), columns = static_cast<std::uint32_t>(out);
  std::byte *h_own = bench.output(m * kRank), *y_own = bench.tensor(y), *dx_own = bench.tensor(dx);
  const auto *x_own = bench.tensor(x), *dy_own = bench.tensor(dy);
  const auto *down_own = bench.tensor(down), *up_own = bench.tensor(up);
  // Rounded once, it is what the products that follow have.
  bench.run(Linear{width, kRank, x_own, down_own, nullptr, nullptr, h_own, Layout::kOutIn});
  const auto h = product(
      m, kRank, in, [&](auto i, auto l) { return x[i * in + l]; }, [&](auto l, auto j) { return down[j * in + l]; });
  expect_close(bench.read(h_own, h.size()), h, shape().type, tolerances().product, "h");
  const Doubles rounded = bench.read(h_own, h.size());

  bench.run(Linear{kRank, columns, h_own, up_own, nullptr, y_own, y_own, Layout::kOutIn});
  auto sum = product(
      m, out, kRank, [&](auto i, auto l) { return rounded[i * kRank + l]; },
      [&](auto l, auto j) { return up[j * kRank + l]; });
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
  expect_close(bench.read(y_own, sum.size()), sum, shape().type, tolerances().product, "y", y);

  float* dup_own = bench.floats(out * kRank);
  bench.run(
      LinearBackwardWeight{kRank, columns, h_own, dy_own, dup_own, nullptr, DType::kFloat32, false, Layout::kOutIn});
  const auto dup = product(
      out, kRank, m, [&](auto i, auto l) { return dy[l * out + i]; },
      [&](auto l, auto j) { return rounded[l * kRank + j]; });
  expect_close(bench.read(dup_own, dup.size(), DType::kFloat32), dup, DType::kFloat32, tolerances().product, "dup");

  std::byte* dh_own = bench.output(m * kRank);
  bench.run(LinearBackwardInput{kRank, columns, dy_own, up_own, dh_own, nullptr, Layout::kOutIn});
  const auto dh = product(
      m, kRank, out, [&](auto i, auto l) { return dy[i * out + l]; },
      [&](auto l, auto j) { return up[l * kRank + j]; });
  expect_close(bench.read(dh_own, dh.size()), dh, shape().type, tolerances().product, "dh");
  const Doubles dh_rounded = bench.read(dh_own, dh.size());

  float* ddown_own = bench.floats(kRank * in);
  bench.run(
      LinearBackwardWeight{width, kRank, x_own, dh_own, ddown_own, nullptr, DType::kFloat32, false, Layout::kOutIn});
  const auto ddown = product(
      kRank, in, m, [&](auto i, auto l) { return dh_rounded[l * kRank + i]; },
      [&](auto l, auto j) { return x[l * in + j]; });
  expect_close(bench.read(ddown_own, ddown.size(), DType::kFloat32), ddown, DType::kFloat32, tolerances().product,
               "ddown");

  bench.run(LinearBackwardInput{width, kRank, dh_own, down_own, dx_own, nullptr, Layout::kOutIn, 0, dx_own});
  auto dx_sum = product(
      m, in, kRank, [&](auto i, auto l) { return dh_rounded[i * kRank + l]; },
      [&](auto l, auto j) { return down[l * in + j]; });
  for (std::size_t i = 0; i < dx_sum.size(); ++i) dx_sum[i] += dx[i];
  expect_close(bench.read(dx_own, dx_sum.size()), dx_sum, shape().type, tolerances().product, "dx", dx);
}

// As queries, keys and values lie side by side. The gradient is that of a step with one micro-batch, in the tensor
// type.
TEST_P(OpsTest, AdaptersAddToColumnsOfWiderRows) {
  Bench bench(with_adapters(shape()), variant(), 2);
  const std::size_t m = tokens(), out = shape().width, stride = out + 60, first = 20;
  const auto columns = static_cast<std::uint32_t>(out);
  const auto h = random_.values(m * kRank), up = random_.values(out * kRank);
  const auto y = random_.values(m * stride), dy = random_.values(m * stride);
  const auto inside = [&](std::byte* rows) { return rows + first * size_of(shape().type); };
  std::byte *y_own = bench.tensor(y), *dy_own = bench.tensor(dy), *dh_own = bench.output(m * kRank);
  const auto *h_own = bench.tensor(h), *up_own = bench.tensor(up);
  bench.run(Linear{kRank, columns, h_own, up_own, nullptr, inside(y_own), inside(y_own), Layout::kOutIn, stride});
  Doubles sum = y;
  const auto added = product(
      m, out, kRank, [&](auto i, auto l) { return h[i * kRank + l]; },
      [&](auto l, auto j) { return up[j * kRank + l]; });
  for (std::size_t i = 0; i < added.size(); ++i) sum[i / out * stride + first + i % out] += added[i];
  expect_close(bench.read(y_own, sum.size()), sum, shape().type, tolerances().product, "y", y);

  const auto dy_at = [&](std::size_t row, std::size_t column) { return dy[row * stride + first + column]; };
  bench.run(LinearBackwardInput{kRank, columns, inside(dy_own), up_own, dh_own, nullptr, Layout::kOutIn, stride});
  const auto dh = product(m, kRank, out, dy_at, [&](auto l, auto j) { return up[l * kRank + j]; });
  expect_close(bench.read(dh_own, dh.size()), dh, shape().type, tolerances().product, "dh");

  std::byte* dup_own = bench.output(out * kRank);
  bench.run(LinearBackwardWeight{kRank, columns, h_own, inside(dy_own), dup_own, nullptr, shape().type, false,
                                 Layout::kOutIn, stride});
  const auto dup = product(
      out, kRank, m, [&](auto i, auto l) { return dy_at(l, i); }, [&](auto l, auto j) { return h[l * kRank + j]; });
  expect_close(bench.read(dup_own, dup.size()), dup, shape().type, tolerances().product, "dup");
}

TEST_P(OpsTest, RowsAreScaledInPlace) {
  const std::size_t count = tokens() * kRank;
  const auto x = random_.values(count);
  std::byte* own = bench_->tensor(x);
  bench_->run(Scale{own, own, 0.75f, kRank});
  Doubles expected;
  for (const double value : x) expected.push_back(0.75 * value);
  close(own, expected, 1e-6, "scaled");
  // Of the first two tokens alone.
  bench_->run(Scale{own, own, 2.0f, kRank, 2});
  for (std::size_t i = 0; i < 2 * std::size_t{kRank}; ++i) expected[i] *= 2;
  close(own, expected, 2e-6, "scaled again", expected);
}

// The same bits as after a product, where the device rounds what gelu sees.
TEST_P(OpsTest, GeluByItselfIsThatOfAProduct) {
  const std::uint32_t columns = shape().inner;
  const std::size_t count = tokens() * columns;
  const auto x = random_.values(count, 2), dy = random_.values(count);
  const auto* before = bench_->tensor(x);
  std::byte *after = bench_->output(count), *dx = bench_->tensor(dy);
  bench_->run(Gelu{before, after, columns});
  bench_->run(GeluBackward{before, dx, columns});
  Doubles y, d;
  for (std::size_t i = 0; i < count; ++i) {
    const double k = std::sqrt(2 / M_PI), v = x[i], t = std::tanh(k * (v + 0.044715 * v * v * v));
    y.push_back(0.5 * v * (1 + t));
    d.push_back(dy[i] * (0.5 * (1 + t) + 0.5 * v * (1 - t * t) * k * (1 + 3 * 0.044715 * v * v)));
  }
  close(after, y, tolerances().gelu, "gelu");
  close(dx, d, tolerances().gelu_backward, "its gradient");
}

TEST_P(OpsTest, WhatIsFrozenChangesNoOtherResult) {
  Bench bench(with_adapters(shape()), variant(), 2);
  const std::size_t m = tokens(), width = shape().width, count = m * width, words = shape().vocabulary;
  const auto x = random_.values(count), dout = random_.values(count), weight = random_.values(width);
  const auto table = random_.values(words * width, 0.3);
  const auto* targets = bench.tokens(random_.tokens(m, shape().vocabulary));
  const auto *x_own = bench.tensor(x), *dout_own = bench.tensor(dout), *weight_own = bench.tensor(weight);
  const auto* table_own = bench.tensor(table);
  float *statistics = bench.floats(2 * m), *losses = bench.floats(m), *dtable = bench.floats(words * width);
  std::byte *out = bench.output(count), *dw = bench.output(width), *db = bench.output(width);
  const auto bytes = [&](const void* memory, std::size_t size) { return bench.read_bytes(memory, size); };
  const std::size_t size = count * size_of(shape().type);
  std::array<std::vector<std::byte>, 2> layer, rms, head, loss;
  for (const bool frozen : {false, true}) {
    const std::size_t i = frozen ? 1 : 0;
    bench.run(LayerNorm{x_own, weight_own, weight_own, out, statistics});
    bench.run(LayerNormBackward{x_own, weight_own, dout_own, statistics, nullptr, out, frozen ? nullptr : dw,
                                frozen ? nullptr : db, shape().type, false});
    layer[i] = bytes(out, size);
    bench.run(HeadLoss{x_own, targets, table_own, 0.1f, losses, out, frozen ? nullptr : dtable, false});
    head[i] = bytes(out, size);
    loss[i] = bytes(losses, m * sizeof(float));
    const auto columns = shape().width;
    bench.run(RmsNorm{x_own, width, weight_own, out, width, statistics, 1, columns});
    bench.run(RmsNormBackward{x_own, width, weight_own, dout_own, width, statistics, nullptr, out, width,
                              frozen ? nullptr : dw, shape().type, false, 1, columns});
    rms[i] = bytes(out, size);
  }
  EXPECT_EQ(layer[0], layer[1]);
  EXPECT_EQ(rms[0], rms[1]);
  EXPECT_EQ(head[0], head[1]);
  EXPECT_EQ(loss[0], loss[1]);
}

}  // namespace
}  // namespace spillway::models
