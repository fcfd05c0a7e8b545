// Continues ops_suite.cc: attention, the head, and all operations one after the other.
#include "tests/tools/models/ops_suite.h"

namespace spillway::models {

AttentionReference attention_reference(const Shape& s, const Doubles& qkv, const Doubles& dout, const Rules& rules) {
  const std::size_t t = s.sequence, width = s.query_width(), head = s.head_width(), stride = s.qkv_width();
  const double scale = rules.scale != 0 ? rules.scale : 1 / std::sqrt(static_cast<double>(head));
  AttentionReference r{Doubles(s.tokens() * width, 0.0), Doubles(qkv.size(), 0.0)};
  for (std::size_t b = 0; b < s.batch; ++b) {
    for (std::size_t h = 0; h < s.heads; ++h) {
      for (std::size_t i = 0; i < t; ++i) {
        const std::size_t q = (b * t + i) * stride + h * head, o = (b * t + i) * width + h * head;
        const auto key = [&](std::size_t j) {
          return (b * t + j) * stride + width + h * s.kv_heads() / s.heads * head;
        };
        const auto value = [&](std::size_t j) { return key(j) + s.kv_heads() * head; };
        std::size_t first = rules.starts.empty() ? 0 : rules.starts[b * t + i];
        if (rules.window != 0 && i + 1 > rules.window) first = std::max<std::size_t>(first, i + 1 - rules.window);
        Doubles p(i + 1, 0.0), dp(i + 1, 0.0), slope(i + 1, scale);
        double maximum = -1e300, sum = 0, dot = 0;
        for (std::size_t j = first; j <= i; ++j) {
          for (std::size_t d = 0; d < head; ++d) p[j] += scale * qkv[q + d] * qkv[key(j) + d];
          if (rules.soft_cap != 0) {
            const double capped = std::tanh(p[j] / rules.soft_cap);
            p[j] = rules.soft_cap * capped;
            slope[j] *= 1 - capped * capped;
          }
          maximum = std::max(maximum, p[j]);
        }
        for (std::size_t j = first; j <= i; ++j) sum += p[j] = std::exp(p[j] - maximum);
        for (std::size_t j = first; j <= i; ++j) {
          p[j] /= sum;
          for (std::size_t d = 0; d < head; ++d) {
            r.out[o + d] += p[j] * qkv[value(j) + d];
            dp[j] += dout[o + d] * qkv[value(j) + d];
            r.dqkv[value(j) + d] += p[j] * dout[o + d];
          }
          dot += p[j] * dp[j];
        }
        for (std::size_t j = first; j <= i; ++j) {
          const double ds = p[j] * (dp[j] - dot) * slope[j];
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

HeadReference head_reference(const Shape& shape, const Doubles& x, const Doubles& token_weight,
                             const std::vector<std::uint32_t>& targets, float scale, float soft_cap) {
  const std::size_t m = shape.tokens(), width = shape.width, vocabulary = shape.vocabulary;
  HeadReference r{Doubles(m, 0.0), Doubles(m * width, 0.0), Doubles(vocabulary * width, 0.0)};
  for (std::size_t i = 0; i < m; ++i) {
    if (targets[i] == kNoTarget) continue;
    Doubles p(vocabulary, 0.0), slope(vocabulary, scale);
    double maximum = -1e300, sum = 0;
    for (std::size_t v = 0; v < vocabulary; ++v) {
      for (std::size_t c = 0; c < width; ++c) p[v] += x[i * width + c] * token_weight[v * width + c];
      if (soft_cap != 0) {
        const double capped = std::tanh(p[v] / soft_cap);
        p[v] = soft_cap * capped;
        slope[v] *= 1 - capped * capped;
      }
      maximum = std::max(maximum, p[v]);
    }
    const double target = p[targets[i]];
    for (auto& v : p) sum += v = std::exp(v - maximum);
    r.losses[i] = maximum + std::log(sum) - target;
    for (std::size_t v = 0; v < vocabulary; ++v) {
      const double d = (p[v] / sum - (v == targets[i] ? 1 : 0)) * slope[v];
      for (std::size_t c = 0; c < width; ++c) {
        r.dx[i * width + c] += d * token_weight[v * width + c];
        r.dtoken_weight[v * width + c] += d * x[i * width + c];
      }
    }
  }
  return r;
}

namespace {

TEST_P(OpsTest, AttentionIsCausal) {
  const std::size_t m = tokens(), width = shape().width;
  const auto qkv = random_.values(m * 3 * width, 1.5), dout = random_.values(m * width);
  const auto *qkv_device = bench_->tensor(qkv), *dout_device = bench_->tensor(dout);
  std::byte *out = bench_->output(m * width), *dqkv = bench_->output(m * 3 * width);
  float* log_sums = bench_->log_sums();
  bench_->run(Attention{qkv_device, out, log_sums});
  bench_->run(AttentionBackward{qkv_device, out, log_sums, dout_device, dqkv});
  const auto expected = attention_reference(shape(), qkv, dout);
  close(out, expected.out, tolerances().attention, "out");
  close(dqkv, expected.dqkv, tolerances().attention, "dqkv");
}

void check_head(Bench& bench, Random& random, const Tolerances& tolerances) {
  const std::size_t m = bench.shape.tokens(), width = bench.shape.width, vocabulary = bench.shape.vocabulary;
  const auto x = random.values(m * width, 0.5), wte = random.values(vocabulary * width, 0.5);
  const auto targets = random.tokens(m, bench.shape.vocabulary);
  const float scale = 1.0f / static_cast<float>(m);
  std::byte* dx = bench.tensor(x);  // dx lies over x
  float* dwte_device = bench.fp32_tensor(Doubles(vocabulary * width, 1.0));
  float *losses = bench.floats(m), *alone = bench.floats(m);
  const auto* targets_device = bench.tokens(targets);
  const auto* wte_device = bench.tensor(wte);
  bench.run(HeadLoss{dx, targets_device, wte_device, scale, alone, nullptr, nullptr, false});
  bench.run(HeadLoss{dx, targets_device, wte_device, scale, losses, dx, dwte_device, true});
  const HeadReference expected = head_reference(bench.shape, x, wte, targets, scale);
  const auto fp32 = [&](const void* memory, std::size_t count) { return bench.read(memory, count, DType::kFloat32); };
  expect_close(fp32(losses, m), expected.losses, DType::kFloat32, 1e-5, "losses");
  EXPECT_EQ(fp32(alone, m), fp32(losses, m)) << "without gradients";
  expect_close(bench.read(dx, m * width), expected.dx, bench.shape.type, tolerances.head, "dx");
  auto result = fp32(dwte_device, vocabulary * width);
  for (auto& v : result) v -= 1;
  // The sum started at 1, whose last bit is 6e-8 beside gradients of about 1e-3.
  expect_close(result, expected.dtoken_weight, tolerances.dlogits, std::max(tolerances.head, 3e-4), "dwte");
}

TEST_P(OpsTest, HeadLossIsCrossEntropyOverTheVocabulary) { check_head(*bench_, random_, tolerances()); }

// Bytes of everything that the operations leave, one after the other.
std::vector<std::byte> all_results(Bench& bench) {
  Random random(bench.shape.type);
  const std::size_t m = bench.shape.tokens(), width = bench.shape.width, inner = bench.shape.inner,
                    e = size_of(bench.shape.type);
  const auto width32 = static_cast<std::uint32_t>(width), inner32 = static_cast<std::uint32_t>(inner);
  const auto tensor = [&](std::size_t count) { return bench.tensor(random.values(count)); };
  const auto *x = tensor(m * width), *d = tensor(m * width), *qkv = tensor(m * 3 * width),
             *weight = tensor(width * inner);
  const auto *bias = tensor(inner), *norm = tensor(width);
  const auto* ids = bench.tokens(random.tokens(m, 7));
  std::vector<std::byte> all;
  const auto keep = [&](const void* memory, std::size_t bytes) {
    const auto read = bench.read_bytes(memory, bytes);
    all.insert(all.end(), read.begin(), read.end());
  };
  std::byte *before = bench.output(m * inner), *after = bench.output(m * inner), *out = bench.output(m * width);
  bench.run(LinearGelu{width32, inner32, x, weight, bias, before, after});
  bench.run(Linear{inner32, width32, after, weight, norm, x, out});
  for (const auto* memory : {before, after}) keep(memory, m * inner * e);
  keep(out, m * width * e);
  bench.run(LinearBackwardInput{inner32, width32, d, weight, after, before});
  keep(after, m * inner * e);
  std::byte *dweight = bench.output(width * inner), *dbias = bench.output(inner);
  bench.run(LinearBackwardWeight{width32, inner32, x, after, dweight, dbias, bench.shape.type, false});
  keep(dweight, width * inner * e);
  keep(dbias, inner * e);
  float *sum_weight = bench.floats(width * inner), *sum_bias = bench.floats(inner), *statistics = bench.floats(2 * m);
  for (const bool accumulate : {false, true}) {
    bench.run(LinearBackwardWeight{width32, inner32, x, after, sum_weight, sum_bias, DType::kFloat32, accumulate});
  }
  keep(sum_weight, width * inner * sizeof(float));
  keep(sum_bias, inner * sizeof(float));
  bench.run(LayerNorm{x, norm, norm, out, statistics});
  keep(out, m * width * e);
  bench.run(LayerNormBackward{x, norm, d, statistics, x, out, dweight, dbias, bench.shape.type, false});
  keep(out, m * width * e);
  for (const auto* memory : {dweight, dbias}) keep(memory, width * e);
  float* log_sums = bench.log_sums();
  std::byte* dqkv = bench.output(m * 3 * width);
  bench.run(Attention{qkv, out, log_sums});
  bench.run(AttentionBackward{qkv, out, log_sums, d, dqkv});
  keep(out, m * width * e);
  keep(dqkv, m * 3 * width * e);
  const std::size_t words = bench.shape.vocabulary * width;
  float *losses = bench.floats(m), *dwords = bench.floats(words);
  float* dpositions = bench.fp32_tensor(Doubles(bench.shape.positions * width, 0.0));
  bench.run(HeadLoss{x, ids, tensor(words), 0.01f, losses, out, dwords, false});
  bench.run(EmbeddingBackward{ids, out, dwords, dpositions});
  keep(losses, m * sizeof(float));
  keep(out, m * width * e);
  keep(dwords, words * sizeof(float));
  keep(dpositions, bench.shape.positions * width * sizeof(float));
  return all;
}

TEST_P(OpsTest, BitsDependNeitherOnThreadsNorOnAddressesNorOnTheRun) {
  const auto expected = all_results(*bench_);
  EXPECT_EQ(all_results(*bench_), expected);  // a second time, elsewhere in the arena
  Bench other(shape(), variant(), 1);
  other.machine->allocate(4160);
  EXPECT_EQ(all_results(other), expected);
}

TEST_P(OpsOfSizeTest, HeadLossGoesOverSlicesOfTokens) {
  const Shape shape{.type = GetParam().type,
                    .batch = 1,
                    .sequence = 1100,
                    .width = 24,
                    .heads = 1,
                    .inner = 8,
                    .vocabulary = 130,
                    .positions = 1100,
                    .epsilon = 1e-5f};
  Bench bench(shape, GetParam(), 2);
  Random random(shape.type);
  check_head(bench, random, GetParam().tolerances);
}

// Longer than the chunks that a vocabulary's gradients are written in.
TEST_P(OpsOfSizeTest, HeadLossTakesLongVocabularies) {
  const Shape shape{.type = GetParam().type,
                    .batch = 1,
                    .sequence = 9,
                    .width = 16,
                    .heads = 1,
                    .inner = 8,
                    .vocabulary = 9001,
                    .positions = 9,
                    .epsilon = 1e-5f};
  Bench bench(shape, GetParam(), 2);
  Random random(shape.type);
  check_head(bench, random, GetParam().tolerances);
}

}  // namespace
}  // namespace spillway::models
