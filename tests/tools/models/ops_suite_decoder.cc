// Continues ops_suite.cc: products, attention and the head as decoders other than GPT-2 have them.
#include <cstring>
#include <utility>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

// 300 tokens over blocks of 256, groups of three heads, which are together wider than a token.
Shape grouped_shape(DType type) {
  return {.type = type,
          .batch = 2,
          .sequence = 150,
          .width = 40,
          .heads = 6,
          .inner = 72,
          .vocabulary = 301,
          .positions = 0,
          .epsilon = 1e-5f,
          .key_heads = 2,
          .head_size = 24};
}
// One key/value head, wider than a panel of 64, and three blocks of keys.
Shape shared_shape(DType type) {
  return {.type = type,
          .batch = 1,
          .sequence = 300,
          .width = 130,
          .heads = 2,
          .inner = 33,
          .vocabulary = 128,
          .positions = 0,
          .epsilon = 1e-5f,
          .key_heads = 1,
          .head_size = 80};
}
// As many key/value heads as heads, and rows that no vector divides.
Shape apart_shape(DType type) {
  Shape shape = uneven_shape(type);
  shape.positions = 0;
  shape.key_heads = shape.heads;
  return shape;
}

class OpsDecoderTest : public OpsTest {
 protected:
  // Rows `stride` apart, each with `rows`' own columns from `column` on, and 7 besides.
  std::byte* strided(const Doubles& rows, std::size_t columns, std::size_t column, std::size_t stride) {
    Doubles all(tokens() * stride, 7.0);
    for (std::size_t i = 0; i < rows.size(); ++i) all[i / columns * stride + column + i % columns] = rows[i];
    return bench_->tensor(all);
  }
  // The columns of strided(), whose other columns must be as they were.
  Doubles columns_of(const void* tensor, std::size_t columns, std::size_t column, std::size_t stride) const {
    const Doubles all = bench_->read(tensor, tokens() * stride);
    Doubles rows;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i % stride >= column && i % stride < column + columns)
        rows.push_back(all[i]);
      else
        EXPECT_EQ(all[i], 7) << "beside the columns, at " << i;
    }
    return rows;
  }
  std::byte* at(std::byte* tensor, std::size_t element) const { return tensor + element * size_of(shape().type); }

  void check_products(std::uint32_t in, std::uint32_t out, Layout layout, std::size_t column, std::size_t stride);
  void check_attention(const Rules& rules);
  void check_head(float soft_cap, const std::vector<std::uint32_t>& targets);
};

INSTANTIATE_TEST_SUITE_P(
    Variants, OpsDecoderTest,
    testing::Combine(testing::ValuesIn(ops_variants()),
                     testing::Values(NamedShape{"grouped", grouped_shape}, NamedShape{"shared", shared_shape},
                                     NamedShape{"apart", apart_shape})),
    [](const auto& info) { return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name; });

// y and dy are columns of wider rows.
void OpsDecoderTest::check_products(std::uint32_t in, std::uint32_t out, Layout layout, std::size_t column,
                                    std::size_t stride) {
  const std::size_t m = tokens();
  const auto x = random_.values(m * in), weight = random_.values(in * out), bias = random_.values(out);
  const auto residual = random_.values(m * out), dy = random_.values(m * out), dx_residual = random_.values(m * in);
  const auto w = [&](std::size_t i, std::size_t o) {
    return layout == Layout::kInOut ? weight[i * out + o] : weight[o * in + i];
  };
  const auto *x_device = bench_->tensor(x), *w_device = bench_->tensor(weight);
  const auto close_to = [&](const Doubles& result, const Doubles& expected, const char* what,
                            const Doubles& before = {}) {
    expect_close(result, expected, shape().type, tolerances().product, what, before);
  };
  const Doubles alone = product(
      m, out, in, [&](auto i, auto k) { return x[i * in + k]; }, w);
  const auto y = [&](bool biased, const Doubles* added) {
    std::byte* rows = strided(added != nullptr ? *added : Doubles(m * out, 3.0), out, column, stride);
    std::byte* own = at(rows, column);
    bench_->run(Linear{.in = in,
                       .out = out,
                       .x = x_device,
                       .weight = w_device,
                       .bias = biased ? bench_->tensor(bias) : nullptr,
                       .residual = added != nullptr ? own : nullptr,
                       .y = own,
                       .layout = layout,
                       .y_stride = stride});
    return columns_of(rows, out, column, stride);
  };
  Doubles expected = alone;
  if (layout == Layout::kOutIn) close_to(y(false, nullptr), expected, "y without a bias");
  Doubles before = rounded_before_bias(alone, {in, out, column, stride});
  for (std::size_t i = 0; i < m * out; ++i) expected[i] += bias[i % out];
  close_to(y(true, nullptr), expected, "y", before);
  // The residual may be added before the bias.
  for (std::size_t i = 0; i < before.size(); ++i) before[i] = std::abs(alone[i]) + std::abs(alone[i] + residual[i]);
  for (std::size_t i = 0; i < m * out; ++i) expected[i] += residual[i];
  close_to(y(true, &residual), expected, "y over its residual", before);

  std::byte* dy_device = at(strided(dy, out, column, stride), column);
  expected = product(
      m, in, out, [&](auto i, auto k) { return dy[i * out + k]; }, [&](auto k, auto j) { return w(j, k); });
  LinearBackwardInput back{.in = in,
                           .out = out,
                           .dy = dy_device,
                           .weight = w_device,
                           .dx = bench_->output(m * in),
                           .layout = layout,
                           .dy_stride = stride};
  bench_->run(back);
  close(back.dx, expected, tolerances().product, "dx");
  for (std::size_t i = 0; i < m * in; ++i) expected[i] += dx_residual[i];
  back.residual = bench_->tensor(dx_residual);
  bench_->run(back);
  close(back.dx, expected, tolerances().product, "dx with a residual");
  back.residual = back.dx = bench_->tensor(dx_residual);
  bench_->run(back);
  close(back.dx, expected, tolerances().product, "dx over its residual");

  auto dw = layout == Layout::kInOut ? product(
                                           in, out, m, [&](auto i, auto k) { return x[k * in + i]; },
                                           [&](auto k, auto j) { return dy[k * out + j]; })
                                     : product(
                                           out, in, m, [&](auto i, auto k) { return dy[k * out + i]; },
                                           [&](auto k, auto j) { return x[k * in + j]; });
  Doubles db(out, 0.0);
  for (std::size_t i = 0; i < m * out; ++i) db[i % out] += dy[i];
  LinearBackwardWeight gradient{.in = in,
                                .out = out,
                                .x = x_device,
                                .dy = dy_device,
                                .dweight = bench_->output(in * out),
                                .dbias = bench_->output(out),
                                .gradient = shape().type,
                                .accumulate = false,
                                .layout = layout,
                                .dy_stride = stride};
  bench_->run(gradient);
  close(gradient.dweight, dw, tolerances().product, "dweight in the tensor type");
  close(gradient.dbias, db, tolerances().product, "dbias in the tensor type");
  gradient.gradient = DType::kFloat32;
  gradient.dweight = bench_->floats(in * out);
  gradient.dbias = bench_->floats(out);
  bench_->run(gradient);
  gradient.accumulate = true;
  bench_->run(gradient);
  void* const dbias = std::exchange(gradient.dbias, nullptr);
  bench_->run(gradient);
  for (auto& v : dw) v *= 3;
  for (auto& v : db) v *= 2;
  close_fp32(gradient.dweight, dw, tolerances().product, "sum of dweight, once without dbias");
  close_fp32(dbias, db, tolerances().product, "sum of dbias");
}

TEST_P(OpsDecoderTest, ProductsTakeEitherLayoutAndColumnsOfWiderRows) {
  const auto query = static_cast<std::uint32_t>(shape().query_width()), width = shape().width, inner = shape().inner;
  const auto key = shape().kv_heads() * shape().head_width();
  const auto qkv = static_cast<std::uint32_t>(shape().qkv_width());
  for (const Layout layout : {Layout::kOutIn, Layout::kInOut}) {
    SCOPED_TRACE(layout == Layout::kOutIn ? "[out][in]" : "[in][out]");
    check_products(width, query, layout, 0, qkv);
    check_products(width, key, layout, query + key, qkv);
    check_products(width, qkv, layout, 0, qkv);
    check_products(query, width, layout, 0, width);
    check_products(width, inner, layout, inner, 2 * inner);
    check_products(width, 2 * inner, layout, 3, 2 * inner + 8);
    check_products(inner, width, layout, 0, width);
  }
}

void OpsDecoderTest::check_attention(const Rules& rules) {
  const std::size_t m = tokens();
  const auto qkv = random_.values(m * shape().qkv_width()), dout = random_.values(m * shape().query_width());
  const auto *qkv_device = bench_->tensor(qkv), *dout_device = bench_->tensor(dout);
  std::byte *out = bench_->output(dout.size()), *dqkv = bench_->output(qkv.size());
  float* log_sums = bench_->log_sums();
  const AttentionRules on_device{.window = rules.window,
                                 .scale = rules.scale,
                                 .soft_cap = rules.soft_cap,
                                 .starts = rules.starts.empty() ? nullptr : bench_->tokens(rules.starts)};
  bench_->run(Attention{qkv_device, out, log_sums, on_device});
  bench_->run(AttentionBackward{qkv_device, out, log_sums, dout_device, dqkv, on_device});
  const auto expected = attention_reference(shape(), qkv, dout, rules);
  close(out, expected.out, tolerances().attention, "out");
  // Gradients of keys and values are sums over a group's heads: longer ones, of numbers larger beside the rest.
  close(dqkv, expected.dqkv, 2 * tolerances().attention, "dqkv");
}

// Starts of documents that begin at these tokens of each row; other rows begin theirs a little later.
std::vector<std::uint32_t> starts_of(const Shape& shape, const std::vector<std::uint32_t>& begins) {
  std::vector<std::uint32_t> starts(shape.tokens(), 0);
  for (std::uint32_t row = 0; row < shape.batch; ++row) {
    for (std::uint32_t i = 0; i < shape.sequence; ++i) {
      for (const std::uint32_t begin : begins) {
        if (begin + 3 * row <= i) starts[row * shape.sequence + i] = begin + 3 * row;
      }
    }
  }
  return starts;
}

TEST_P(OpsDecoderTest, HeadsOfAGroupShareKeysAndValues) { check_attention({}); }

TEST_P(OpsDecoderTest, WindowsBoundWhatAQuerySees) {
  for (const std::uint32_t window : {1u, 5u, 16u, 64u, 128u, 129u, 200u, 1000u}) {
    SCOPED_TRACE(window);
    check_attention({.window = window});
  }
}

TEST_P(OpsDecoderTest, DocumentsOfARowDoNotSeeEachOther) {
  const std::vector<std::vector<std::uint32_t>> begins = {{1},  {7, 8, 9, 20}, {64}, {128}, {10, 63, 64, 127, 129, 256},
                                                          {140}};
  for (const auto& each : begins) {
    SCOPED_TRACE(each.front());
    check_attention({.starts = starts_of(shape(), each)});
    check_attention({.window = 40, .starts = starts_of(shape(), each)});
  }
  // A token that sees itself alone, always.
  std::vector<std::uint32_t> own(tokens());
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = static_cast<std::uint32_t>(i % shape().sequence);
  check_attention({.starts = own});
}

TEST_P(OpsDecoderTest, ScoresAreScaledAndCapped) {
  check_attention({.scale = 0.15f});
  for (const float soft_cap : {1.5f, 4.0f, 50.0f}) {
    SCOPED_TRACE(soft_cap);
    check_attention({.soft_cap = soft_cap});
    check_attention({.scale = 0.15f, .soft_cap = soft_cap});
  }
  check_attention({.window = 70, .scale = 0.2f, .soft_cap = 2.5f, .starts = starts_of(shape(), {3, 100, 131})});
}

// Whatever lies in another document, however large, changes no bit, and gets a gradient of exactly 0.
TEST_P(OpsDecoderTest, WhatIsNotSeenCountsForNothing) {
  const std::size_t m = tokens(), t = shape().sequence, qkv_width = shape().qkv_width(), width = shape().query_width();
  const std::size_t begin = t > 140 ? 135 : 20;  // of each row's second document
  const auto* starts = bench_->tokens([&] {
    std::vector<std::uint32_t> all(m, 0);
    for (std::size_t i = 0; i < m; ++i) all[i] = i % t >= begin ? static_cast<std::uint32_t>(begin) : 0;
    return all;
  }());
  auto qkv = random_.values(m * qkv_width), dout = random_.values(m * width);
  for (std::size_t i = 0; i < dout.size(); ++i) dout[i] = i / width % t < begin ? 0 : dout[i];
  const auto run = [&] {
    const auto *qkv_device = bench_->tensor(qkv), *dout_device = bench_->tensor(dout);
    std::byte *out = bench_->output(dout.size()), *dqkv = bench_->output(qkv.size());
    float* log_sums = bench_->log_sums();
    bench_->run(Attention{qkv_device, out, log_sums, {.starts = starts}});
    bench_->run(AttentionBackward{qkv_device, out, log_sums, dout_device, dqkv, {.starts = starts}});
    const Doubles gradients = bench_->read(dqkv, qkv.size());
    Doubles seen;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (i / qkv_width % t < begin)
        EXPECT_EQ(gradients[i], 0) << i;
      else
        seen.push_back(gradients[i]);
    }
    const Doubles outputs = bench_->read(out, dout.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (i / width % t >= begin) seen.push_back(outputs[i]);
    }
    return seen;
  };
  const Doubles expected = run();
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] *= i / qkv_width % t < begin ? -1000 : 1;
  EXPECT_EQ(run(), expected);
}

// The bits of GPT-2, whose shapes do not name how many key/value heads there are.
TEST_P(OpsDecoderTest, GroupsOfOneHeadHaveTheBitsOfHeads) {
  if (shape().kv_heads() != shape().heads) GTEST_SKIP() << "groups of several heads";
  const auto results = [&](const Shape& of) {
    Bench bench(of, variant(), 1);
    Random random(of.type);
    const std::size_t count = of.tokens() * of.width;
    const auto *qkv = bench.tensor(random.values(3 * count)), *dout = bench.tensor(random.values(count));
    std::byte *out = bench.output(count), *dqkv = bench.output(3 * count);
    float* log_sums = bench.log_sums();
    bench.run(Attention{qkv, out, log_sums});
    bench.run(AttentionBackward{qkv, out, log_sums, dout, dqkv});
    auto all = bench.read_bytes(out, count * size_of(of.type));
    const auto more = bench.read_bytes(dqkv, 3 * count * size_of(of.type));
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  Shape without = shape();
  without.key_heads = 0;
  EXPECT_EQ(results(shape()), results(without));
}

void OpsDecoderTest::check_head(float soft_cap, const std::vector<std::uint32_t>& targets) {
  const std::size_t m = tokens(), width = shape().width, words = shape().vocabulary;
  const auto x = random_.values(m * width, 0.5), table = random_.values(words * width, 0.5);
  const float scale = 1.0f / static_cast<float>(m);
  const HeadReference expected = head_reference(shape(), x, table, targets, scale, soft_cap);
  const auto *x_device = bench_->tensor(x), *table_device = bench_->tensor(table);
  std::byte* dx = bench_->output(m * width);
  float *losses = bench_->floats(m), *alone = bench_->floats(m), *dtable = bench_->floats(words * width);
  const auto* targets_device = bench_->tokens(targets);
  bench_->run(HeadLoss{x_device, targets_device, table_device, scale, losses, dx, dtable, false, soft_cap});
  bench_->run(HeadLoss{x_device, targets_device, table_device, scale, alone, nullptr, nullptr, false, soft_cap});
  const Doubles losses_read = bench_->read(losses, m, DType::kFloat32), dx_read = bench_->read(dx, m * width);
  for (std::size_t i = 0; i < m; ++i) {
    if (targets[i] != kNoTarget) continue;
    EXPECT_EQ(losses_read[i], 0) << i;
    for (std::size_t c = 0; c < width; ++c) ASSERT_EQ(dx_read[i * width + c], 0) << i;
  }
  expect_close(losses_read, expected.losses, DType::kFloat32, 1e-5, "losses");
  EXPECT_EQ(bench_->read(alone, m, DType::kFloat32), losses_read) << "without gradients";
  expect_close(dx_read, expected.dx, shape().type, tolerances().head, "dx");
  const Doubles once = bench_->read(dtable, words * width, DType::kFloat32);
  expect_close(once, expected.dtoken_weight, tolerances().dlogits, tolerances().head, "gradient of the table");
  bench_->run(HeadLoss{x_device, targets_device, table_device, scale, losses, dx, dtable, true, soft_cap});
  Doubles twice = expected.dtoken_weight;
  for (auto& v : twice) v *= 2;
  expect_close(bench_->read(dtable, words * width, DType::kFloat32), twice, tolerances().dlogits, tolerances().head,
               "sum of gradients of the table");
}

TEST_P(OpsDecoderTest, HeadLossIsOfCappedLogits) {
  for (const float soft_cap : {0.0f, 1.0f, 5.0f, 30.0f}) {
    SCOPED_TRACE(soft_cap);
    check_head(soft_cap, random_.tokens(tokens(), shape().vocabulary));
  }
}

TEST_P(OpsDecoderTest, TokensWithoutATargetHaveNoLossAndNoGradient) {
  auto targets = random_.tokens(tokens(), shape().vocabulary);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (i % 3 == 0 || i % 100 > 30) targets[i] = kNoTarget;
  }
  for (const float soft_cap : {0.0f, 2.0f}) {
    check_head(soft_cap, targets);
    check_head(soft_cap, std::vector<std::uint32_t>(tokens(), kNoTarget));
  }
}

// Bytes of everything that the operations leave, one after the other.
std::vector<std::byte> all_results(Bench& bench) {
  const Shape& shape = bench.shape;
  Random random(shape.type);
  const std::size_t m = shape.tokens(), width = shape.width, qkv_width = shape.qkv_width(), e = size_of(shape.type);
  const std::size_t query_width = shape.query_width(), words = shape.vocabulary * width;
  const auto query = static_cast<std::uint32_t>(query_width);
  const auto tensor = [&](std::size_t count) { return bench.tensor(random.values(count)); };
  std::vector<std::byte> all;
  const auto keep = [&](const void* memory, std::size_t bytes) {
    const auto read = bench.read_bytes(memory, bytes);
    all.insert(all.end(), read.begin(), read.end());
  };
  const auto *x = tensor(m * width), *weight = tensor(width * query_width), *dout = tensor(m * query_width);
  std::byte *qkv = tensor(m * qkv_width), *dqkv = bench.output(m * qkv_width), *out = bench.output(m * query_width);
  std::byte *dx = tensor(m * width), *dweight = bench.output(width * query_width);
  bench.run(Linear{shape.width, query, x, weight, nullptr, nullptr, qkv, Layout::kOutIn, qkv_width});
  const AttentionRules rules{.window = 60, .soft_cap = 4, .starts = bench.tokens(starts_of(shape, {5, 14, 90, 128}))};
  float* log_sums = bench.log_sums();
  bench.run(Attention{qkv, out, log_sums, rules});
  bench.run(AttentionBackward{qkv, out, log_sums, dout, dqkv, rules});
  bench.run(LinearBackwardInput{shape.width, query, dqkv, weight, dx, nullptr, Layout::kOutIn, qkv_width, dx});
  bench.run(LinearBackwardWeight{shape.width, query, x, dqkv, dweight, nullptr, shape.type, false, Layout::kOutIn,
                                 qkv_width});
  for (const auto* memory : {qkv, dqkv}) keep(memory, m * qkv_width * e);
  keep(out, m * query_width * e);
  keep(dx, m * width * e);
  keep(dweight, width * query_width * e);
  auto targets = random.tokens(m, shape.vocabulary);
  for (std::size_t i = 0; i < m; i += 4) targets[i] = kNoTarget;
  float *losses = bench.floats(m), *dwords = bench.floats(words);
  bench.run(HeadLoss{x, bench.tokens(targets), tensor(words), 0.01f, losses, dx, dwords, false, 3});
  keep(losses, m * sizeof(float));
  keep(dx, m * width * e);
  keep(dwords, words * sizeof(float));
  return all;
}

TEST_P(OpsDecoderTest, BitsDependNeitherOnThreadsNorOnAddressesNorOnTheRun) {
  const auto expected = all_results(*bench_);
  EXPECT_EQ(all_results(*bench_), expected);  // a second time, elsewhere in the arena
  for (const unsigned threads : {1u, 3u}) {
    Bench other(shape(), variant(), threads);
    other.machine->allocate(4160);
    EXPECT_EQ(all_results(other), expected) << threads;
  }
}

}  // namespace
}  // namespace spillway::models
