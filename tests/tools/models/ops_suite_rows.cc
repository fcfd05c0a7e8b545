// Continues ops_suite.cc: operations on rows that decoders have. A device need not compute them.
#include <array>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

// Rows of `columns` numbers with others around them, which an operation must leave alone.
struct Wide {
  Wide(Bench& bench, Random& random, std::size_t row, std::size_t before, std::size_t after, double spread = 1)
      : columns(row),
        stride(before + row + after),
        first(before),
        values(random.values(bench.shape.tokens() * stride, spread)),
        memory(bench.tensor(values)),
        at(memory + before * size_of(bench.shape.type)) {}

  // As they were.
  double operator()(std::size_t m, std::size_t c) const { return values[m * stride + first + c]; }
  // As they are.
  Doubles read(const Bench& bench) const {
    const Doubles all = bench.read(memory, values.size());
    Doubles rows;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i % stride >= first && i % stride < first + columns)
        rows.push_back(all[i]);
      else if (all[i] != values[i])
        ADD_FAILURE() << "column " << i % stride << " of row " << i / stride << " was changed";
    }
    return rows;
  }

  std::size_t columns, stride, first;
  Doubles values;
  std::byte *memory, *at;
};

// `margin`: columns of other tensors around rows.
void check_rms_norm(Bench& bench, Random& random, std::uint32_t groups, float offset, std::size_t margin) {
  SCOPED_TRACE(testing::Message() << groups << " groups, offset " << offset << ", margin " << margin);
  const Shape& shape = bench.shape;
  const std::size_t m = shape.tokens(), width = shape.width, columns = width / groups;
  const auto columns32 = static_cast<std::uint32_t>(columns);
  // So small that epsilon counts.
  const Wide x(bench, random, width, margin, margin, 1.0 / 32), out(bench, random, width, 0, 2 * margin);
  const Wide dout(bench, random, width, 2 * margin, 0), dx(bench, random, width, margin, 0);
  const auto weight = random.values(columns);
  const auto* w = bench.tensor(weight);
  float* statistics = bench.floats(m * groups);
  bench.run(RmsNorm{x.at, x.stride, w, out.at, out.stride, statistics, groups, columns32, offset});
  std::byte* dw_own = bench.output(columns);
  RmsNormBackward backward{x.at,      x.stride, w,          dout.at, dout.stride, statistics, nullptr, dx.at,
                           dx.stride, dw_own,   shape.type, false,   groups,      columns32,  offset};
  bench.run(backward);

  Doubles y(m * width), d(m * width), dw_sum(columns, 0.0), rstds;
  const double n = static_cast<double>(columns);
  for (std::size_t row = 0; row < m * groups; ++row) {
    const std::size_t i = row / groups, begin = row % groups * columns;
    double square = 0, mean_gn = 0;
    for (std::size_t c = 0; c < columns; ++c) square += x(i, begin + c) * x(i, begin + c) / n;
    const double rstd = 1 / std::sqrt(square + shape.epsilon);
    rstds.push_back(rstd);
    for (std::size_t c = 0; c < columns; ++c) {
      const double normalized = x(i, begin + c) * rstd;
      y[i * width + begin + c] = normalized * (weight[c] + offset);
      mean_gn += dout(i, begin + c) * (weight[c] + offset) * normalized / n;
      dw_sum[c] += dout(i, begin + c) * normalized;
    }
    for (std::size_t c = 0; c < columns; ++c) {
      const double g = dout(i, begin + c) * (weight[c] + offset);
      d[i * width + begin + c] = rstd * (g - x(i, begin + c) * rstd * mean_gn);
    }
  }
  const auto close = [&](const Doubles& result, const Doubles& expected, DType type, const char* what) {
    expect_close(result, expected, type, 1e-5, what);
  };
  const auto fp32 = [&](const void* memory, std::size_t count) { return bench.read(memory, count, DType::kFloat32); };
  close(out.read(bench), y, shape.type, "y");
  close(fp32(statistics, m * groups), rstds, DType::kFloat32, "1 / rms");
  close(dx.read(bench), d, shape.type, "dx");
  close(bench.read(dw_own, columns), dw_sum, shape.type, "dweight in the tensor type");

  // Added to an fp32 sum and, of whole rows, to what comes past the norm.
  Doubles dw(columns, 1.0);
  backward.dweight = bench.fp32_tensor(dw);
  backward.gradient = DType::kFloat32;
  backward.accumulate = true;
  if (groups == 1) {
    const auto residual = random.values(m * width);
    const Wide apart(bench, random, width, margin, margin);
    std::byte* over = bench.tensor(residual);
    backward.residual = over;
    backward.dx = apart.at;
    backward.dx_stride = apart.stride;
    bench.run(backward);
    backward.dx = over;
    backward.dx_stride = width;
    bench.run(backward);
    for (std::size_t i = 0; i < d.size(); ++i) d[i] += residual[i];
    close(apart.read(bench), d, shape.type, "dx with a residual");
    EXPECT_EQ(bench.read(over, m * width), apart.read(bench));
    for (std::size_t c = 0; c < columns; ++c) dw[c] += 2 * dw_sum[c];
    backward.residual = nullptr;
  }
  // In the same places.
  backward.dx = dout.at;
  backward.dx_stride = dout.stride;
  bench.run(backward);
  EXPECT_EQ(dout.read(bench), dx.read(bench));
  for (std::size_t c = 0; c < columns; ++c) dw[c] += dw_sum[c];
  close(fp32(backward.dweight, columns), dw, DType::kFloat32, "dweight, added");
  bench.run(RmsNorm{x.at, x.stride, w, x.at, x.stride, statistics, groups, columns32, offset});
  EXPECT_EQ(x.read(bench), out.read(bench));
}

TEST_P(OpsTest, RmsNormNormalizesRowsOrHeads) {
  check_rms_norm(*bench_, random_, 1, 0, 0);
  check_rms_norm(*bench_, random_, 1, 1, 5);
  check_rms_norm(*bench_, random_, shape().heads, 1, 0);
  check_rms_norm(*bench_, random_, shape().heads, 0, 2 * shape().width + 3);
}

TEST_P(OpsOfSizeTest, RmsNormTakesWideRows) {
  for (const Shape& shape : wide_shapes(GetParam().type)) {
    SCOPED_TRACE(shape.width);
    Bench bench(shape, GetParam(), 2);
    Random random(shape.type);
    check_rms_norm(bench, random, 1, 0, 0);
    check_rms_norm(bench, random, shape.heads, 1, 1);
  }
}

// Cosines and sines of positions: [sequence][pairs][2].
Doubles angles(std::size_t sequence, std::size_t pairs) {
  Doubles table;
  for (std::size_t p = 0; p < sequence; ++p) {
    for (std::size_t i = 0; i < pairs; ++i) {
      const double angle =
          static_cast<double>(p) * std::pow(10000, -static_cast<double>(i) / static_cast<double>(pairs));
      for (const double v : {std::cos(angle), std::sin(angle)}) table.push_back(static_cast<float>(v));
    }
  }
  return table;
}

TEST_P(OpsTest, RotaryTurnsPairsOfColumnsAndBack) {
  const std::size_t m = tokens(), heads = shape().heads, head = shape().width / heads;
  for (const std::size_t rotated : {head / 2 * 2, head * 3 / 10 * 2, std::size_t{2}}) {
    for (const bool given : {false, true}) {
      SCOPED_TRACE(testing::Message() << rotated << (given ? " columns, positions given" : " columns"));
      const std::size_t half = rotated / 2;
      const auto positions = random_.tokens(m, shape().sequence);
      const auto table = angles(shape().sequence, half);
      // The queries of [query | key | value], and then alone.
      const Wide x(*bench_, random_, heads * head, given ? 2 * heads * head : 0, given ? 0 : 1);
      Rotary op{.x = x.at,
                .stride = x.stride,
                .heads = shape().heads,
                .head_width = static_cast<std::uint32_t>(head),
                .rotated = static_cast<std::uint32_t>(rotated),
                .table = bench_->fp32_tensor(table),
                .positions = given ? bench_->tokens(positions) : nullptr};
      bench_->run(op);
      Doubles turned(m * x.columns), back(m * x.columns), lengths(m * x.columns);
      for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t c = 0; c < x.columns; ++c) {
          const std::size_t at = i * x.columns + c, column = c % head, pair = column % half;
          turned[at] = back[at] = x(i, c);
          if (column >= rotated) continue;
          const std::size_t position = given ? positions[i] : i % shape().sequence;
          const double cosine = table[2 * (position * half + pair)], sine = table[2 * (position * half + pair) + 1];
          const bool low = column < half;
          const double other = x(i, low ? c + half : c - half);
          turned[at] = x(i, c) * cosine + (low ? -1 : 1) * other * sine;
          lengths[at] = std::hypot(x(i, c), other);
        }
      }
      const Doubles result = x.read(*bench_);
      expect_close(result, turned, shape().type, 1e-6, "turned");
      for (std::size_t i = 0; i < result.size(); ++i) {
        if (i % head >= rotated) {
          ASSERT_EQ(result[i], turned[i]) << "column " << i % head << " is not turned";
        }
      }
      op.backward = true;
      bench_->run(op);
      expect_close(x.read(*bench_), back, shape().type, 1e-6, "turned back", lengths);
    }
  }
}

double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kGeluTanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGelu: break;
  }
  return 0.5 * x * std::erfc(-x / std::sqrt(2));
}

double slope(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
    case Activation::kGeluTanh: {
      const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::kGelu: break;
  }
  return 0.5 * std::erfc(-x / std::sqrt(2)) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

TEST_P(OpsTest, GatesMultiplyWhatIsActivated) {
  const std::size_t m = tokens(), inner = shape().inner;
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu}) {
    SCOPED_TRACE(static_cast<int>(activation));
    auto gate_up = random_.values(m * 2 * inner, 2);
    auto dout = random_.values(m * inner);
    for (std::size_t i = 0; i < 6; ++i) {
      gate_up[i] = std::array{0.0, -0.0, 30.0, -30.0, 100.0, -100.0}[i];
      gate_up[inner + i] = dout[i] = 0.0625;  // what is large is not to widen the tolerance
    }
    std::byte *device = bench_->tensor(gate_up), *out = bench_->output(m * inner);
    const auto* dout_device = bench_->tensor(dout);
    std::byte* dgate_up = bench_->output(m * 2 * inner);
    bench_->run(GatedActivation{device, out, activation});
    bench_->run(GatedActivationBackward{device, dout_device, dgate_up, activation});
    Doubles expected(m * inner), derivatives(m * 2 * inner);
    for (std::size_t i = 0; i < m * inner; ++i) {
      const std::size_t at = i / inner * 2 * inner + i % inner;
      const double gate = gate_up[at], up = gate_up[at + inner], value = activated(activation, gate);
      expected[i] = value * up;
      derivatives[at] = dout[i] * up * slope(activation, gate);
      derivatives[at + inner] = dout[i] * value;
    }
    close(out, expected, 3e-6, "out");
    // Around |x| = 3 an error in the last place of tanh's argument is multiplied by x^3, and the product of three
    // numbers may be ten times its root mean square.
    close(dgate_up, derivatives, 3e-5, "dgate and dup");
    bench_->run(GatedActivationBackward{device, dout_device, device, activation});
    EXPECT_EQ(bench_->read(device, m * 2 * inner), bench_->read(dgate_up, m * 2 * inner));
  }
}

TEST_P(OpsTest, SumsMayLieOverWhatIsAdded) {
  const std::size_t count = tokens() * shape().width;
  const auto a = random_.values(count), b = random_.values(count);
  std::byte *a_device = bench_->tensor(a), *b_device = bench_->tensor(b), *sum = bench_->output(count);
  std::byte* third = bench_->tensor(a);
  bench_->run(Add{a_device, b_device, sum});
  bench_->run(Add{a_device, b_device, b_device});
  bench_->run(Add{a_device, third, a_device});
  // fp32 sums of what the tensor type holds exactly, rounded once.
  Doubles expected(count), twice(count);
  for (std::size_t i = 0; i < count; ++i) {
    expected[i] = FakeEngine::rounded(static_cast<float>(a[i]) + static_cast<float>(b[i]), shape().type);
    twice[i] = FakeEngine::rounded(static_cast<float>(2 * a[i]), shape().type);
  }
  EXPECT_EQ(bench_->read(sum, count), expected);
  EXPECT_EQ(bench_->read(b_device, count), expected);
  EXPECT_EQ(bench_->read(a_device, count), twice);
}

TEST_P(OpsTest, EmbeddingsNeedNoPositionsAndMayBeScaled) {
  const std::size_t m = tokens(), width = shape().width, words = shape().vocabulary * width;
  auto ids = random_.tokens(m, shape().vocabulary);
  for (std::size_t i = 0; i < m; i += 2) ids[i] %= 5;
  const auto table = random_.values(words), dout = random_.values(m * width);
  const auto* ids_device = bench_->tokens(ids);
  const auto *table_device = bench_->tensor(table), *dout_device = bench_->tensor(dout);
  std::byte* out = bench_->output(m * width);
  for (const float scale : {1.0f, 7.7459667f}) {
    SCOPED_TRACE(scale);
    bench_->run(Embedding{ids_device, table_device, nullptr, out, scale});
    Doubles expected(m * width), sums(words, 0.5);
    float* dtable = bench_->fp32_tensor(sums);
    bench_->run(EmbeddingBackward{ids_device, dout_device, dtable, nullptr, scale});
    for (std::size_t i = 0; i < m; ++i) {
      for (std::size_t c = 0; c < width; ++c) {
        expected[i * width + c] = table[ids[i] * width + c] * scale;
        sums[ids[i] * width + c] += dout[i * width + c] * scale;
      }
    }
    close(out, expected, 1e-6, "rows");
    close_fp32(dtable, sums, 1e-5, "their gradients");
  }
}

// Bytes that operations have left, one after the other.
struct Kept {
  Bench& bench;
  std::vector<std::byte> all = {};
  void keep(const void* memory, std::size_t bytes) {
    const auto read = bench.read_bytes(memory, bytes);
    all.insert(all.end(), read.begin(), read.end());
  }
};

std::vector<std::byte> row_results(Bench& bench) {
  Random random(bench.shape.type);
  const Shape& shape = bench.shape;
  const std::size_t m = shape.tokens(), width = shape.width, inner = shape.inner, e = size_of(shape.type);
  const std::uint32_t groups = shape.heads, columns = shape.width / shape.heads, rotated = columns / 2 * 2;
  const auto tensor = [&](std::size_t count) { return bench.tensor(random.values(count)); };
  Kept kept{bench};
  std::byte *x = tensor(m * width), *dout = tensor(m * width), *weight = tensor(width), *out = bench.output(m * width);
  float *statistics = bench.floats(m * groups), *dweight = bench.fp32_tensor(Doubles(width, 0.5));
  for (const std::uint32_t of : {1u, groups}) {
    const std::uint32_t row = shape.width / of;
    bench.run(RmsNorm{x, width, weight, out, width, statistics, of, row, 1});
    kept.keep(out, m * width * e);
    kept.keep(statistics, m * of * sizeof(float));
    bench.run(RmsNormBackward{x, width, weight, dout, width, statistics, nullptr, out, width, dweight, DType::kFloat32,
                              true, of, row, 1});
    kept.keep(out, m * width * e);
    kept.keep(dweight, row * sizeof(float));
  }
  bench.run(
      Rotary{x, width, groups, columns, rotated, bench.fp32_tensor(angles(shape.sequence, rotated / 2)), nullptr});
  kept.keep(x, m * width * e);
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu}) {
    std::byte *gate_up = tensor(m * 2 * inner), *gated = bench.output(m * inner);
    bench.run(GatedActivation{gate_up, gated, activation});
    bench.run(GatedActivationBackward{gate_up, gated, gate_up, activation});
    kept.keep(gated, m * inner * e);
    kept.keep(gate_up, m * 2 * inner * e);
  }
  bench.run(Add{x, dout, out});
  kept.keep(out, m * width * e);
  return kept.all;
}

std::vector<std::byte> table_results(Bench& bench) {
  Random random(bench.shape.type);
  const std::size_t m = bench.shape.tokens(), width = bench.shape.width, words = bench.shape.vocabulary * width;
  const auto* ids = bench.tokens(random.tokens(m, 7));
  std::byte* out = bench.output(m * width);
  float* dtable = bench.fp32_tensor(Doubles(words, 0.0));
  bench.run(Embedding{ids, bench.tensor(random.values(words)), nullptr, out, 3});
  bench.run(EmbeddingBackward{ids, bench.tensor(random.values(m * width)), dtable, nullptr, 3});
  Kept kept{bench};
  kept.keep(out, m * width * size_of(bench.shape.type));
  kept.keep(dtable, words * sizeof(float));
  return kept.all;
}

// Of another run elsewhere in the arena, and of operations with one thread.
template <typename Results>
void check_bits(Bench& bench, const Variant& variant, const Results& results) {
  const std::vector<std::byte> expected = results(bench);
  EXPECT_EQ(results(bench), expected);
  Bench other(bench.shape, variant, 1);
  other.machine->allocate(4160);
  EXPECT_EQ(results(other), expected);
}

TEST_P(OpsTest, BitsOfRowsDependNeitherOnThreadsNorOnAddresses) { check_bits(*bench_, variant(), row_results); }
TEST_P(OpsTest, BitsOfTablesDependNeitherOnThreadsNorOnAddresses) { check_bits(*bench_, variant(), table_results); }

}  // namespace
}  // namespace spillway::models
