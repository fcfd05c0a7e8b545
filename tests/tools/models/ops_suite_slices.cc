// Continues ops_suite.cc: operations that are given a slice of the tokens.
#include <utility>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

// Rows of two slices and a rest, in groups of two heads.
Shape long_shape(DType type) {
  return {.type = type,
          .batch = 1,
          .sequence = 300,
          .width = 48,
          .heads = 4,
          .inner = 72,
          .vocabulary = 130,
          .positions = 0,
          .epsilon = 1e-5f,
          .key_heads = 2,
          .head_size = 24,
          .slice = 128};
}
// A slice is two rows, the last one a row.
Shape rows_shape(DType type) {
  Shape shape = long_shape(type);
  shape.batch = 5;
  shape.sequence = 70;
  shape.slice = 140;
  return shape;
}

class OpsSliceTest : public OpsTest {
 protected:
  struct Slice {
    std::uint32_t first, count;
  };
  std::vector<Slice> slices() const {
    std::vector<Slice> all;
    for (std::size_t first = 0; first < tokens(); first += shape().slice) {
      all.push_back({static_cast<std::uint32_t>(first),
                     static_cast<std::uint32_t>(std::min<std::size_t>(shape().slice, tokens() - first))});
    }
    return all;
  }
  std::byte* at(std::byte* tensor, std::size_t element) const { return tensor + element * size_of(shape().type); }
  const std::byte* at(const std::byte* tensor, std::size_t element) const {
    return tensor + element * size_of(shape().type);
  }
  void check_attention(const Rules& rules);
};

INSTANTIATE_TEST_SUITE_P(
    Variants, OpsSliceTest,
    testing::Combine(testing::ValuesIn(ops_variants()),
                     testing::Values(NamedShape{"long", long_shape}, NamedShape{"rows", rows_shape})),
    [](const auto& info) { return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name; });

// Parts forward from the first, backward from the last; slices of whole rows in one operation each.
void OpsSliceTest::check_attention(const Rules& rules) {
  const std::size_t stride = shape().qkv_width(), query = shape().query_width();
  const std::size_t key = std::size_t{shape().kv_heads()} * shape().head_width();
  const auto qkv = random_.values(tokens() * stride), dout = random_.values(tokens() * query);
  const auto *qkv_device = bench_->tensor(qkv), *dout_device = bench_->tensor(dout);
  // Keys and values lie apart, and another stride from each other.
  Doubles pairs;
  for (std::size_t i = 0; i < tokens(); ++i) {
    for (std::size_t c = 0; c < 2 * key; ++c) pairs.push_back(qkv[i * stride + query + c]);
    for (std::size_t c = 0; c < 8; ++c) pairs.push_back(1e4);
  }
  const std::byte* pairs_device = bench_->tensor(pairs);
  std::byte *out = bench_->output(dout.size()), *dqkv = bench_->output(qkv.size());
  float* dkv = bench_->fp32_tensor(Doubles(tokens() * 2 * key, 0.0));
  const auto* starts = rules.starts.empty() ? nullptr : bench_->tokens(rules.starts);
  const bool parts = shape().sequence > shape().slice;
  const auto rules_of = [&](const Slice& slice) {
    return AttentionRules{.window = rules.window,
                          .scale = rules.scale,
                          .soft_cap = rules.soft_cap,
                          .starts = starts == nullptr ? nullptr : starts + slice.first};
  };
  const auto part_of = [&](const Slice& slice) {
    return AttentionPart{.keys = parts ? pairs_device : nullptr,
                         .values = parts ? at(pairs_device, key) : nullptr,
                         .stride = 2 * key + 8,
                         .first = slice.first,
                         .count = parts ? slice.count : 0};
  };
  std::vector<float*> log_sums;
  for (const Slice& slice : slices()) {
    log_sums.push_back(bench_->log_sums());
    bench_->run(Attention{.qkv = at(qkv_device, slice.first * stride),
                          .out = at(out, slice.first * query),
                          .log_sums = log_sums.back(),
                          .rules = rules_of(slice),
                          .part = part_of(slice),
                          .count = slice.count});
  }
  for (std::size_t s = slices().size(); s-- > 0;) {
    const Slice slice = slices()[s];
    bench_->run(AttentionBackward{.qkv = at(qkv_device, slice.first * stride),
                                  .out = at(out, slice.first * query),
                                  .log_sums = log_sums[s],
                                  .dout = at(dout_device, slice.first * query),
                                  .dqkv = at(dqkv, slice.first * stride),
                                  .rules = rules_of(slice),
                                  .part = part_of(slice),
                                  .dkv = parts ? dkv : nullptr,
                                  .count = slice.count});
  }
  const auto expected = attention_reference(shape(), qkv, dout, rules);
  close(out, expected.out, tolerances().attention, "out");
  close(dqkv, expected.dqkv, 2 * tolerances().attention, "dqkv");
}

TEST_P(OpsSliceTest, AttentionOfSlicesIsThatOfRows) {
  std::vector<std::uint32_t> starts(tokens(), 0);
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const std::size_t position = i % shape().sequence;
    starts[i] = position < 20 ? 0 : position < 200 ? 20 : position < 256 ? 200 : 256;
  }
  check_attention({});
  for (const std::uint32_t window : {1u, 40u, 128u, 129u, 257u}) {
    SCOPED_TRACE(window);
    check_attention({.window = window});
  }
  check_attention({.soft_cap = 3});
  check_attention({.starts = starts});
  check_attention({.window = 60, .scale = 0.3f, .soft_cap = 2, .starts = starts});
}

TEST_P(OpsSliceTest, AProductsSlicesAreItsRows) {
  const std::uint32_t in = shape().width, out = 2 * shape().inner;
  const auto x = random_.values(tokens() * in), weight = random_.values(out * in), dy = random_.values(tokens() * out);
  const auto *x_device = bench_->tensor(x), *w_device = bench_->tensor(weight), *dy_device = bench_->tensor(dy);
  std::byte *y = bench_->output(tokens() * out), *dx = bench_->output(tokens() * in);
  float* dweight = bench_->floats(in * out);
  for (const Slice& s : slices()) {
    bench_->run(Linear{.in = in,
                       .out = out,
                       .x = at(x_device, std::size_t{s.first} * in),
                       .weight = w_device,
                       .bias = nullptr,
                       .residual = nullptr,
                       .y = at(y, std::size_t{s.first} * out),
                       .layout = Layout::kOutIn,
                       .count = s.count});
    bench_->run(LinearBackwardInput{.in = in,
                                    .out = out,
                                    .dy = at(dy_device, std::size_t{s.first} * out),
                                    .weight = w_device,
                                    .dx = at(dx, std::size_t{s.first} * in),
                                    .layout = Layout::kOutIn,
                                    .count = s.count});
    bench_->run(LinearBackwardWeight{.in = in,
                                     .out = out,
                                     .x = at(x_device, std::size_t{s.first} * in),
                                     .dy = at(dy_device, std::size_t{s.first} * out),
                                     .dweight = dweight,
                                     .dbias = nullptr,
                                     .gradient = DType::kFloat32,
                                     .accumulate = s.first > 0,
                                     .layout = Layout::kOutIn,
                                     .count = s.count});
  }
  const std::size_t m = tokens();
  close(y,
        product(
            m, out, in, [&](auto i, auto k) { return x[i * in + k]; },
            [&](auto k, auto j) { return weight[j * in + k]; }),
        tolerances().product, "y");
  close(dx,
        product(
            m, in, out, [&](auto i, auto k) { return dy[i * out + k]; },
            [&](auto k, auto j) { return weight[k * in + j]; }),
        tolerances().product, "dx");
  close_fp32(
      dweight,
      product(
          out, in, m, [&](auto i, auto k) { return dy[k * out + i]; }, [&](auto k, auto j) { return x[k * in + j]; }),
      tolerances().product, "dweight");
}

// Rows each have their own bits, whichever slice they are in; sums over tokens go on from slice to slice.
TEST_P(OpsSliceTest, RowsOfSlicesHaveTheBitsOfRows) {
  const std::size_t m = tokens(), width = shape().width, inner = shape().inner;
  const auto x = random_.values(m * width), dout = random_.values(m * width), weight = random_.values(width);
  const auto gates = random_.values(m * 2 * inner), dinner = random_.values(m * inner);
  const auto table = random_.values(shape().vocabulary * width);
  const auto tokens_read = random_.tokens(m, shape().vocabulary);
  const auto results = [&](const std::vector<Slice>& slices, Bench& bench) {
    const auto *x_device = bench.tensor(x), *w = bench.tensor(weight), *d_device = bench.tensor(dout);
    const auto *gates_device = bench.tensor(gates), *dinner_device = bench.tensor(dinner);
    const auto* table_device = bench.tensor(table);
    const auto* words = bench.tokens(tokens_read);
    std::byte *normed = bench.output(m * width), *dx = bench.output(m * width), *sum = bench.output(m * width);
    std::byte *embedded = bench.output(m * width), *copied = bench.output(m * width);
    std::byte *gated = bench.output(m * inner), *dgates = bench.output(2 * m * inner);
    float *statistics = bench.floats(m), *dweight = bench.floats(width);
    float* dtable = bench.fp32_tensor(Doubles(table.size(), 0.0));
    for (const Slice& s : slices) {
      const std::size_t row = s.first * width;
      bench.run(Embedding{.tokens = words + s.first,
                          .token_weight = table_device,
                          .position_weight = nullptr,
                          .out = at(embedded, row),
                          .scale = 3,
                          .count = s.count});
      bench.run(EmbeddingBackward{.tokens = words + s.first,
                                  .dout = at(d_device, row),
                                  .dtoken_weight = dtable,
                                  .dposition_weight = nullptr,
                                  .scale = 3,
                                  .count = s.count});
      bench.run(RmsNorm{.x = at(x_device, row),
                        .x_stride = width,
                        .weight = w,
                        .out = at(normed, row),
                        .out_stride = width,
                        .statistics = statistics + s.first,
                        .groups = 1,
                        .columns = shape().width,
                        .count = s.count});
      bench.run(RmsNormBackward{.x = at(x_device, row),
                                .x_stride = width,
                                .weight = w,
                                .dout = at(d_device, row),
                                .dout_stride = width,
                                .statistics = statistics + s.first,
                                .residual = at(x_device, row),
                                .dx = at(dx, row),
                                .dx_stride = width,
                                .dweight = dweight,
                                .gradient = DType::kFloat32,
                                .accumulate = s.first > 0,
                                .groups = 1,
                                .columns = shape().width,
                                .count = s.count});
      bench.run(GatedActivation{at(gates_device, 2 * s.first * inner), at(gated, s.first * inner), Activation::kSilu,
                                s.count});
      bench.run(GatedActivationBackward{at(gates_device, 2 * s.first * inner), at(dinner_device, s.first * inner),
                                        at(dgates, 2 * s.first * inner), Activation::kSilu, s.count});
      bench.run(Add{at(x_device, row), at(d_device, row), at(sum, row), s.count});
      bench.run(CopyRows{at(x_device, row), width, at(copied, row), width, shape().width, s.count});
    }
    std::vector<Doubles> all;
    for (const auto* tensor : {normed, dx, sum, embedded, copied}) all.push_back(bench.read(tensor, m * width));
    all.push_back(bench.read(gated, m * inner));
    all.push_back(bench.read(dgates, 2 * m * inner));
    return std::pair(
        all, std::pair(bench.read(dweight, width, DType::kFloat32), bench.read(dtable, table.size(), DType::kFloat32)));
  };
  const auto sliced = results(slices(), *bench_);
  Shape whole = shape();
  whole.slice = 0;
  Bench other(whole, variant(), 1);
  const auto expected = results({{0, static_cast<std::uint32_t>(m)}}, other);
  EXPECT_EQ(sliced.first, expected.first);
  EXPECT_EQ(sliced.first[4], x);
  expect_close(sliced.second.first, expected.second.first, DType::kFloat32, 1e-5, "sum of the norm's gradients");
  expect_close(sliced.second.second, expected.second.second, DType::kFloat32, 1e-5, "sum of the table's gradients");
}

TEST_P(OpsSliceTest, HeadLossOfSlices) {
  const std::size_t m = tokens(), width = shape().width, words = shape().vocabulary;
  const auto x = random_.values(m * width, 0.5), table = random_.values(words * width, 0.5);
  auto targets = random_.tokens(m, shape().vocabulary);
  targets[3] = kNoTarget;
  const float scale = 1.0f / static_cast<float>(m);
  const HeadReference expected = head_reference(shape(), x, table, targets, scale, 0);
  const auto *x_device = bench_->tensor(x), *table_device = bench_->tensor(table);
  const auto* targets_device = bench_->tokens(targets);
  std::byte* dx = bench_->output(m * width);
  float *losses = bench_->floats(m), *dtable = bench_->floats(words * width);
  for (const Slice& s : slices()) {
    bench_->run(HeadLoss{.x = at(x_device, s.first * width),
                         .targets = targets_device + s.first,
                         .token_weight = table_device,
                         .scale = scale,
                         .losses = losses + s.first,
                         .dx = at(dx, s.first * width),
                         .dtoken_weight = dtable,
                         .accumulate = s.first > 0,
                         .count = s.count});
  }
  close_fp32(losses, expected.losses, 1e-5, "losses");
  close(dx, expected.dx, tolerances().head, "dx");
  expect_close(bench_->read(dtable, words * width, DType::kFloat32), expected.dtoken_weight, tolerances().dlogits,
               tolerances().head, "gradient of the table");
}

}  // namespace
}  // namespace spillway::models
