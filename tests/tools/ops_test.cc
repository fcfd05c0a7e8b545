// The host operations against plain double-precision loops. Inputs are values of the tensor type, so the reference sees
// the same numbers; fp32 results may differ by fp32 sums, bf16 results also by one rounding.
#include "tools/gpt2/ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "tests/tools/fake_engine.h"
#include "tools/gpt2/ops_host.h"

namespace spillway::gpt2 {
namespace {

using Doubles = std::vector<double>;

struct Variant {
  const char* name;
  DType type;
  GemmPath path;
};

// A shape, an engine to hold its tensors, and the operations on it.
class Bench {
 public:
  Bench(const Shape& shape, GemmPath path, unsigned threads)
      : shape(shape), ops(shape, threads, path), engine(description(ops), shape.type, threads, 64 << 20) {
    ops.bind(engine, engine.workspace());
  }

  std::byte* tensor(const Doubles& values) { return tensor(values, shape.type); }
  std::byte* tensor(const Doubles& values, DType type) {
    std::byte* memory = engine.allocate(values.size() * size_of(type));
    for (std::size_t i = 0; i < values.size(); ++i) FakeEngine::put(memory, i, type, static_cast<float>(values[i]));
    return memory;
  }
  std::byte* output(std::size_t count) { return engine.allocate(count * size_of(shape.type)); }
  float* floats(std::size_t count) { return reinterpret_cast<float*>(engine.allocate(count * sizeof(float))); }
  std::uint32_t* tokens(const std::vector<std::uint32_t>& values) {
    auto* memory = reinterpret_cast<std::uint32_t*>(engine.allocate(values.size() * 4));
    std::copy(values.begin(), values.end(), memory);
    return memory;
  }
  Doubles read(const void* memory, std::size_t count) const { return read(memory, count, shape.type); }
  static Doubles read(const void* memory, std::size_t count, DType type) {
    Doubles out(count);
    for (std::size_t i = 0; i < count; ++i) out[i] = FakeEngine::widened(memory, i, type);
    return out;
  }
  template <typename Op>
  void run(const Op& op) {
    ops.run(op, engine.stream());
  }

  Shape shape;
  HostOps ops;
  FakeEngine engine;

 private:
  static ModelDescription description(const HostOps& ops) {
    ModelDescription model;
    model.workspace_bytes = ops.scratch_bytes();
    return model;
  }
};

class Random {
 public:
  explicit Random(DType type) : type_(type) {}
  // Values that the tensor type holds exactly.
  Doubles values(std::size_t count, double spread = 1) {
    Doubles out(count);
    std::normal_distribution<float> normal(0, static_cast<float>(spread));
    for (auto& v : out) {
      const float drawn = normal(generator_);
      v = FakeEngine::rounded(drawn, type_);
    }
    return out;
  }
  std::vector<std::uint32_t> tokens(std::size_t count, std::uint32_t below) {
    std::vector<std::uint32_t> out(count);
    for (auto& t : out) t = static_cast<std::uint32_t>(generator_() % below);
    return out;
  }

 private:
  DType type_;
  std::mt19937 generator_{20240501};
};

// Largest difference relative to the reference's root mean square. `rounded`: one rounding to the tensor type besides.
void expect_close(const Doubles& result, const Doubles& expected, DType type, double tolerance, const char* what) {
  ASSERT_EQ(result.size(), expected.size());
  double square = 0;
  for (const double v : expected) square += v * v;
  const double scale = std::sqrt(square / static_cast<double>(expected.size()));
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double rounding = type == DType::kBFloat16  ? std::abs(expected[i]) / 256
                            : type == DType::kFloat16 ? std::abs(expected[i]) / 2048 + 0x1p-25  // half of a subnormal
                                                      : 0;
    ASSERT_NEAR(result[i], expected[i], tolerance * scale + rounding) << what << " at " << i;
  }
}

// y[m][n] = sum over k of a(m, k) * b(k, n)
Doubles product(std::size_t m, std::size_t n, std::size_t k, const std::function<double(std::size_t, std::size_t)>& a,
                const std::function<double(std::size_t, std::size_t)>& b) {
  Doubles out(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t l = 0; l < k; ++l) {
      for (std::size_t j = 0; j < n; ++j) out[i * n + j] += a(i, l) * b(l, j);
    }
  }
  return out;
}

// Sizes that are no multiples of any block: 300 tokens over 256-row blocks, heads of 20, vocabulary 301.
Shape odd_shape(DType type) {
  return {.type = type,
          .batch = 2,
          .sequence = 150,
          .width = 60,
          .heads = 3,
          .inner = 200,
          .vocabulary = 301,
          .positions = 160,
          .epsilon = 1e-5f};
}
Shape even_shape(DType type) {
  return {.type = type,
          .batch = 1,
          .sequence = 128,
          .width = 128,
          .heads = 1,
          .inner = 320,
          .vocabulary = 256,
          .positions = 128,
          .epsilon = 1e-5f};
}

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"fp32", DType::kFloat32, GemmPath::kFloat32},
                              {"bf16_widened", DType::kBFloat16, GemmPath::kFloat32},
                              {"fp16", DType::kFloat16, GemmPath::kFloat32}};
  if (__builtin_cpu_supports("avx512bf16")) all.push_back({"bf16_native", DType::kBFloat16, GemmPath::kBFloat16});
  return all;
}

class HostOpsTest : public testing::TestWithParam<std::tuple<Variant, bool>> {
 protected:
  HostOpsTest()
      : bench_(std::get<1>(GetParam()) ? odd_shape(variant().type) : even_shape(variant().type), variant().path, 2),
        random_(variant().type) {}
  static Variant variant() { return std::get<0>(GetParam()); }
  Shape shape() const { return bench_.shape; }
  std::size_t tokens() const { return bench_.shape.tokens(); }
  void close(const void* memory, const Doubles& expected, double tolerance, const char* what) const {
    expect_close(bench_.read(memory, expected.size()), expected, shape().type, tolerance, what);
  }
  void close_fp32(const void* memory, const Doubles& expected, double tolerance, const char* what) const {
    expect_close(Bench::read(memory, expected.size(), DType::kFloat32), expected, DType::kFloat32, tolerance, what);
  }

  Bench bench_;
  Random random_;
};

TEST_P(HostOpsTest, EmbeddingAddsTokenAndPositionRows) {
  const std::size_t m = tokens(), width = shape().width;
  const auto ids = random_.tokens(m, shape().vocabulary);
  const auto wte = random_.values(shape().vocabulary * width), wpe = random_.values(shape().positions * width);
  std::byte* out = bench_.output(m * width);
  const auto* device_ids = bench_.tokens(ids);
  bench_.run(Embedding{device_ids, bench_.tensor(wte), bench_.tensor(wpe), out});
  Doubles expected(m * width);
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t c = 0; c < width; ++c) {
      expected[i * width + c] = wte[ids[i] * width + c] + wpe[i % shape().sequence * width + c];
    }
  }
  close(out, expected, 1e-6, "embedding");

  const auto dout = random_.values(m * width);
  std::vector<double> dwte(shape().vocabulary * width, 0.5), dwpe(shape().positions * width, -0.25);
  std::byte* dwte_device = bench_.tensor(dwte, DType::kFloat32);
  std::byte* dwpe_device = bench_.tensor(dwpe, DType::kFloat32);
  bench_.run(EmbeddingBackward{device_ids, bench_.tensor(dout), reinterpret_cast<float*>(dwte_device),
                               reinterpret_cast<float*>(dwpe_device)});
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t c = 0; c < width; ++c) {
      dwte[ids[i] * width + c] += dout[i * width + c];
      dwpe[i % shape().sequence * width + c] += dout[i * width + c];
    }
  }
  close_fp32(dwte_device, dwte, 1e-5, "dwte");
  close_fp32(dwpe_device, dwpe, 1e-5, "dwpe");
}

TEST_P(HostOpsTest, LayerNormNormalizesRowsAndItsGradientSumsToZero) {
  const std::size_t m = tokens(), width = shape().width;
  auto x = random_.values(m * width, 2);
  const auto weight = random_.values(width), bias = random_.values(width), dout = random_.values(m * width);
  const auto residual = random_.values(m * width);
  const auto* x_device = bench_.tensor(x);
  const auto *w_device = bench_.tensor(weight), *dout_device = bench_.tensor(dout);
  std::byte* out = bench_.output(m * width);
  float* statistics = bench_.floats(2 * m);
  bench_.run(LayerNorm{x_device, w_device, bench_.tensor(bias), out, statistics});
  std::byte* dx = bench_.tensor(residual);
  Doubles dw(width, 1.0), db(width, 2.0);
  std::byte *dw_device = bench_.tensor(dw, DType::kFloat32), *db_device = bench_.tensor(db, DType::kFloat32);
  bench_.run(LayerNormBackward{x_device, w_device, dout_device, statistics, dx, dx, dw_device, db_device,
                               DType::kFloat32, true});
  Doubles y(m * width), d(m * width);
  const double n = static_cast<double>(width);
  for (std::size_t i = 0; i < m; ++i) {
    double mean = 0, variance = 0, mean_g = 0, mean_gn = 0;
    for (std::size_t c = 0; c < width; ++c) mean += x[i * width + c] / n;
    for (std::size_t c = 0; c < width; ++c) variance += std::pow(x[i * width + c] - mean, 2) / n;
    const double rstd = 1 / std::sqrt(variance + shape().epsilon);
    for (std::size_t c = 0; c < width; ++c) {
      const double normalized = (x[i * width + c] - mean) * rstd, g = dout[i * width + c] * weight[c];
      y[i * width + c] = normalized * weight[c] + bias[c];
      mean_g += g / n;
      mean_gn += g * normalized / n;
      dw[c] += dout[i * width + c] * normalized;
      db[c] += dout[i * width + c];
    }
    for (std::size_t c = 0; c < width; ++c) {
      const double normalized = (x[i * width + c] - mean) * rstd, g = dout[i * width + c] * weight[c];
      d[i * width + c] = rstd * (g - mean_g - normalized * mean_gn) + residual[i * width + c];
    }
  }
  close(out, y, 1e-5, "y");
  close(dx, d, 1e-5, "dx");
  close_fp32(dw_device, dw, 1e-5, "dweight");
  close_fp32(db_device, db, 1e-5, "dbias");
}

TEST_P(HostOpsTest, LinearAndItsGradientsAreMatrixProducts) {
  const std::size_t m = tokens(), in = shape().inner, out = shape().width;
  const auto x = random_.values(m * in), weight = random_.values(in * out), bias = random_.values(out);
  const auto residual = random_.values(m * out), dy = random_.values(m * out);
  const auto *x_device = bench_.tensor(x), *w_device = bench_.tensor(weight), *dy_device = bench_.tensor(dy);
  std::byte* y = bench_.output(m * out);
  const auto in32 = static_cast<std::uint32_t>(in), out32 = static_cast<std::uint32_t>(out);
  bench_.run(Linear{in32, out32, x_device, w_device, bench_.tensor(bias), bench_.tensor(residual), y});
  auto expected = product(
      m, out, in, [&](auto i, auto k) { return x[i * in + k]; }, [&](auto k, auto j) { return weight[k * out + j]; });
  for (std::size_t i = 0; i < m * out; ++i) expected[i] += bias[i % out] + residual[i];
  close(y, expected, 5e-6, "y");

  std::byte* dx = bench_.output(m * in);
  bench_.run(LinearBackwardInput{in32, out32, dy_device, w_device, dx});
  close(dx,
        product(
            m, in, out, [&](auto i, auto k) { return dy[i * out + k]; },
            [&](auto k, auto j) { return weight[j * out + k]; }),
        5e-6, "dx");

  auto dw = product(
      in, out, m, [&](auto i, auto k) { return x[k * in + i]; }, [&](auto k, auto j) { return dy[k * out + j]; });
  Doubles db(out, 0.0);
  for (std::size_t i = 0; i < m * out; ++i) db[i % out] += dy[i];
  std::byte *dw_own = bench_.output(in * out), *db_own = bench_.output(out);
  bench_.run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_own, db_own, shape().type, false});
  close(dw_own, dw, 5e-6, "dweight in the tensor type");
  close(db_own, db, 5e-6, "dbias in the tensor type");

  float *dw_sum = bench_.floats(in * out), *db_sum = bench_.floats(out);
  bench_.run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_sum, db_sum, DType::kFloat32, false});
  bench_.run(LinearBackwardWeight{in32, out32, x_device, dy_device, dw_sum, db_sum, DType::kFloat32, true});
  for (auto& v : dw) v *= 2;
  for (auto& v : db) v *= 2;
  close_fp32(dw_sum, dw, 5e-6, "sum of dweight");
  close_fp32(db_sum, db, 5e-6, "sum of dbias");
}

TEST_P(HostOpsTest, GeluIsTheTanhForm) {
  const std::size_t count = tokens() * shape().inner;
  auto x = random_.values(count, 3), dy = random_.values(count);
  for (std::size_t i = 0; i < 8; ++i) x[i] = std::vector<double>{0, -0.0, 1e-3, -1e-3, 30, -30, 100, -100}[i];
  const auto *x_device = bench_.tensor(x), *dy_device = bench_.tensor(dy);
  x = bench_.read(x_device, count);  // 1e-3 is no bf16
  std::byte *y = bench_.output(count), *dx = bench_.output(count);
  bench_.run(Gelu{x_device, y});
  bench_.run(GeluBackward{x_device, dy_device, dx});
  Doubles expected(count), derivative(count);
  const double k = std::sqrt(2 / M_PI);
  for (std::size_t i = 0; i < count; ++i) {
    const double t = std::tanh(k * (x[i] + 0.044715 * x[i] * x[i] * x[i]));
    expected[i] = 0.5 * x[i] * (1 + t);
    derivative[i] = dy[i] * (0.5 * (1 + t) + 0.5 * x[i] * (1 - t * t) * k * (1 + 3 * 0.044715 * x[i] * x[i]));
  }
  // Around |x| = 3 an error in the last place of u is multiplied by x^3.
  close(y, expected, 1e-5, "y");
  close(dx, derivative, 1e-5, "dx");
}

struct AttentionReference {
  Doubles out, dqkv;
};

AttentionReference attention_reference(const Shape& s, const Doubles& qkv, const Doubles& dout) {
  const std::size_t t = s.sequence, width = s.width, head = width / s.heads, stride = 3 * width;
  const double scale = 1 / std::sqrt(static_cast<double>(head));
  AttentionReference r{Doubles(s.tokens() * width, 0.0), Doubles(qkv.size(), 0.0)};
  for (std::size_t b = 0; b < s.batch; ++b) {
    for (std::size_t h = 0; h < s.heads; ++h) {
      for (std::size_t i = 0; i < t; ++i) {
        const std::size_t q = (b * t + i) * stride + h * head, o = (b * t + i) * width + h * head;
        const auto key = [&](std::size_t j) { return (b * t + j) * stride + width + h * head; };
        const auto value = [&](std::size_t j) { return key(j) + width; };
        Doubles p(i + 1, 0.0), dp(i + 1, 0.0);
        double maximum = -1e300, sum = 0, dot = 0;
        for (std::size_t j = 0; j <= i; ++j) {
          for (std::size_t d = 0; d < head; ++d) p[j] += scale * qkv[q + d] * qkv[key(j) + d];
          maximum = std::max(maximum, p[j]);
        }
        for (auto& v : p) sum += v = std::exp(v - maximum);
        for (auto& v : p) v /= sum;
        for (std::size_t j = 0; j <= i; ++j) {
          for (std::size_t d = 0; d < head; ++d) {
            r.out[o + d] += p[j] * qkv[value(j) + d];
            dp[j] += dout[o + d] * qkv[value(j) + d];
            r.dqkv[value(j) + d] += p[j] * dout[o + d];
          }
          dot += p[j] * dp[j];
        }
        for (std::size_t j = 0; j <= i; ++j) {
          const double ds = p[j] * (dp[j] - dot) * scale;
          for (std::size_t d = 0; d < head; ++d) {
            r.dqkv[q + d] += ds * qkv[key(j) + d];
            r.dqkv[key(j) + d] += ds * qkv[q + d];
          }
        }
      }
    }
  }
  return r;
}

TEST_P(HostOpsTest, AttentionIsCausal) {
  const std::size_t m = tokens(), width = shape().width;
  const auto qkv = random_.values(m * 3 * width, 1.5), dout = random_.values(m * width);
  const auto *qkv_device = bench_.tensor(qkv), *dout_device = bench_.tensor(dout);
  std::byte *out = bench_.output(m * width), *dqkv = bench_.output(m * 3 * width);
  bench_.run(Attention{qkv_device, out});
  bench_.run(AttentionBackward{qkv_device, dout_device, dqkv});
  const auto expected = attention_reference(shape(), qkv, dout);
  close(out, expected.out, 1e-5, "out");
  close(dqkv, expected.dqkv, 1e-5, "dqkv");
}

TEST_P(HostOpsTest, HeadLossIsCrossEntropyOverTheVocabulary) {
  const std::size_t m = tokens(), width = shape().width, vocabulary = shape().vocabulary;
  const auto x = random_.values(m * width, 0.5), wte = random_.values(vocabulary * width, 0.5);
  const auto targets = random_.tokens(m, shape().vocabulary);
  const float scale = 1.0f / static_cast<float>(m);
  std::byte* dx = bench_.tensor(x);  // dx lies over x
  Doubles dwte(vocabulary * width, 1.0);
  std::byte* dwte_device = bench_.tensor(dwte, DType::kFloat32);
  float* losses = bench_.floats(m);
  bench_.run(HeadLoss{dx, bench_.tokens(targets), bench_.tensor(wte), scale, losses, dx,
                      reinterpret_cast<float*>(dwte_device), true});
  Doubles expected_losses(m), expected_dx(m * width, 0.0);
  for (std::size_t i = 0; i < m; ++i) {
    Doubles p(vocabulary, 0.0);
    double maximum = -1e300, sum = 0;
    for (std::size_t v = 0; v < vocabulary; ++v) {
      for (std::size_t c = 0; c < width; ++c) p[v] += x[i * width + c] * wte[v * width + c];
      maximum = std::max(maximum, p[v]);
    }
    const double target = p[targets[i]];
    for (auto& v : p) sum += v = std::exp(v - maximum);
    expected_losses[i] = maximum + std::log(sum) - target;
    for (std::size_t v = 0; v < vocabulary; ++v) {
      const double d = (p[v] / sum - (v == targets[i] ? 1 : 0)) * scale;
      for (std::size_t c = 0; c < width; ++c) {
        expected_dx[i * width + c] += d * wte[v * width + c];
        dwte[v * width + c] += d * x[i * width + c];
      }
    }
  }
  close_fp32(losses, expected_losses, 1e-5, "losses");
  // The bf16 product takes dlogits rounded to bf16: each term is off by up to 2^-9 of itself.
  const double tolerance = variant().path == GemmPath::kBFloat16 ? 2e-2 : 1e-5;
  close(dx, expected_dx, tolerance, "dx");
  for (auto& v : dwte) v -= 1;
  auto result = Bench::read(dwte_device, dwte.size(), DType::kFloat32);
  for (auto& v : result) v -= 1;
  // The sum started at 1, whose last bit is 6e-8 beside gradients of about 1e-3.
  expect_close(result, dwte, DType::kFloat32, std::max(tolerance, 3e-4), "dwte");
}

INSTANTIATE_TEST_SUITE_P(Variants, HostOpsTest, testing::Combine(testing::ValuesIn(variants()), testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) ? "_odd" : "_even");
                         });

class HostOpsRoundingTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, HostOpsRoundingTest, testing::Values(DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// With the same inputs and the same fp32 inside, an operation in 16 bits is the fp32 operation rounded once, bit for
// bit.
TEST_P(HostOpsRoundingTest, ResultsAreFp32ResultsRoundedOnce) {
  Bench wide(odd_shape(DType::kFloat32), GemmPath::kFloat32, 1), half(odd_shape(GetParam()), GemmPath::kFloat32, 1);
  Random random(GetParam());
  const std::size_t m = wide.shape.tokens(), width = wide.shape.width, inner = wide.shape.inner;
  const auto x = random.values(m * 3 * width), weight = random.values(width * inner), bias = random.values(inner);
  const auto run = [&](Bench& bench) {
    const auto in = static_cast<std::uint32_t>(width), out = static_cast<std::uint32_t>(inner);
    std::byte *y = bench.output(m * inner), *attention = bench.output(m * width), *dx = bench.output(m * width);
    std::byte* dqkv = bench.output(m * 3 * width);
    std::byte* gelu = bench.output(m * inner);
    const auto* input = bench.tensor(x);
    const auto* dy = bench.tensor(Doubles(m * inner, 0.375));
    const auto* w = bench.tensor(weight);
    bench.run(Linear{in, out, input, w, bench.tensor(bias), nullptr, y});
    bench.run(LinearBackwardInput{in, out, dy, w, dx});
    bench.run(Attention{input, attention});
    bench.run(AttentionBackward{input, input, dqkv});
    bench.run(Gelu{dy, gelu});
    Doubles all;
    for (const auto& [memory, count] :
         {std::pair(y, m * inner), {dx, m * width}, {attention, m * width}, {dqkv, m * 3 * width}, {gelu, m * inner}}) {
      const auto values = bench.read(memory, count);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  const auto expected = run(wide), result = run(half);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(result[i], FakeEngine::rounded(static_cast<float>(expected[i]), GetParam())) << i;
  }
}

TEST(HostOpsDeathTest, PointersOutsideTheArenaAreRefused) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Bench bench(even_shape(DType::kFloat32), GemmPath::kFloat32, 1);
  std::vector<float> outside(bench.shape.tokens() * bench.shape.inner);
  std::byte* inside = bench.output(outside.size());
  EXPECT_DEATH(bench.run(Gelu{outside.data(), inside}), "inside the HBM arena only");
  EXPECT_DEATH(bench.run(Gelu{inside, outside.data()}), "inside the HBM arena only");
}

}  // namespace
}  // namespace spillway::gpt2
