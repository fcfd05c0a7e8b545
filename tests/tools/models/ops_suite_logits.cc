// Continues ops_suite.cc: the logits of a few tokens.
#include <cmath>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

Shape of_decoder(DType type) {
  return {.type = type,
          .batch = 1,
          .sequence = 90,
          .width = 72,
          .heads = 3,
          .inner = 88,
          .vocabulary = 301,
          .positions = 0,
          .epsilon = 1e-5f,
          .key_heads = 1,
          .head_size = 24,
          .slice = 90,
          .forward_alone = true};
}
Shape of_gpt2(DType type) {
  Shape shape = even_shape(type);
  shape.forward_alone = true;
  return shape;
}

class OpsLogitsTest : public OpsTest {
 protected:
  void SetUp() override {
    if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
    bench_.emplace(std::get<1>(GetParam()).of(variant().type), variant(), 2);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Variants, OpsLogitsTest,
    testing::Combine(testing::ValuesIn(ops_variants()),
                     testing::Values(NamedShape{"decoder", of_decoder}, NamedShape{"gpt2", of_gpt2})),
    [](const auto& info) { return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name; });

TEST_P(OpsLogitsTest, LogitsAreProductsWithTheTable) {
  const std::size_t width = shape().width, words = shape().vocabulary;
  const auto table = random_.values(words * width, 0.3);
  const std::byte* table_device = bench_->tensor(table);
  for (const std::uint32_t count : {1u, 2u, 67u}) {
    for (const float soft_cap : {0.0f, 2.5f}) {
      if (soft_cap != 0 && shape().key_heads == 0) continue;  // a GPT-2 has none
      const auto x = random_.values(count * width);
      float* const logits = bench_->floats(count * words);
      bench_->run(Logits{bench_->tensor(x), table_device, logits, soft_cap, count});
      Doubles expected = product(
          count, words, width, [&](std::size_t m, std::size_t k) { return x[m * width + k]; },
          [&](std::size_t k, std::size_t n) { return table[n * width + k]; });
      for (double& logit : expected)
        if (soft_cap != 0) logit = soft_cap * std::tanh(logit / soft_cap);
      close_fp32(logits, expected, tolerances().head, "logits");
    }
  }
}

}  // namespace
}  // namespace spillway::models
