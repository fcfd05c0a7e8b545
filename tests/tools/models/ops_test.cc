// The operations of the `host` device: the suite on each way to compute products that this machine has.
#include "tests/tools/models/ops_suite.h"
#include "tools/models/ops/ops_host.h"

namespace spillway::models {
namespace {

class HostMachine final : public OpsMachine {
 public:
  HostMachine(const Shape& shape, unsigned threads, GemmPath path)
      : ops_(shape, threads, path), engine_(description(ops_), shape.type, threads, 96 << 20) {
    ops_.bind(engine_, engine_.workspace());
  }
  Ops& ops() override { return ops_; }
  Stream& stream() override { return engine_.stream(); }
  std::byte* allocate(std::size_t bytes) override { return engine_.allocate(bytes); }
  void put(const void* from, void* to, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void get(const void* from, void* to, std::size_t bytes) override { std::memcpy(to, from, bytes); }

 private:
  static ModelDescription description(const HostOps& ops) {
    ModelDescription model;
    model.workspace_bytes = ops.scratch_bytes();
    return model;
  }
  HostOps ops_;
  FakeEngine engine_;
};

Variant host_variant(const char* name, DType type, GemmPath path) {
  Variant variant{.name = name, .type = type, .tolerances = {}, .create = {}};
  // The bf16 product takes dlogits, probabilities and their gradients rounded to bf16: each term is off by up to 2^-9
  // of itself.
  if (path == GemmPath::kBFloat16) {
    variant.tolerances.head = 2e-2;
    variant.tolerances.attention = 3e-2;
    variant.tolerances.dlogits = DType::kBFloat16;
  }
  variant.create = [path](const Shape& shape, unsigned threads) {
    return std::make_unique<HostMachine>(shape, threads, path);
  };
  return variant;
}

TEST(HostOps, HaveNoChoiceOfWhatIsFused) {
  EXPECT_NE(create_ops(DeviceKind::kHost, odd_shape(DType::kFloat32), 1), nullptr);
  EXPECT_THROW(create_ops(DeviceKind::kHost, odd_shape(DType::kFloat32), 1, Fusion::kNone), Error);
}

// Scores of a whole row would grow with its square.
TEST(HostOps, ScratchGrowsWithTheRowAlone) {
  const auto scratch = [](std::uint32_t sequence) {
    const Shape shape{.type = DType::kBFloat16,
                      .batch = 1,
                      .sequence = sequence,
                      .width = 256,
                      .heads = 4,
                      .inner = 512,
                      .vocabulary = 1000,
                      .key_heads = 2,
                      .head_size = 128};
    return static_cast<double>(create_host_ops(shape, 1)->scratch_bytes());
  };
  EXPECT_LT(scratch(32'768), 2.1 * scratch(16'384));
}

class HostOpsRoundingTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, HostOpsRoundingTest, testing::Values(DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// With the same inputs and the same fp32 inside, an operation in 16 bits is the fp32 operation rounded once, bit for
// bit.
TEST_P(HostOpsRoundingTest, ResultsAreFp32ResultsRoundedOnce) {
  Bench wide(odd_shape(DType::kFloat32), host_variant("", DType::kFloat32, GemmPath::kFloat32), 1),
      half(odd_shape(GetParam()), host_variant("", GetParam(), GemmPath::kFloat32), 1);
  Random random(GetParam());
  const std::size_t m = wide.shape.tokens(), width = wide.shape.width, inner = wide.shape.inner;
  const auto x = random.values(m * 3 * width), weight = random.values(width * inner), bias = random.values(inner);
  const auto run = [&](Bench& bench) {
    const auto in = static_cast<std::uint32_t>(width), out = static_cast<std::uint32_t>(inner);
    std::byte *y = bench.output(m * inner), *attention = bench.output(m * width), *dx = bench.output(m * width);
    std::byte* dqkv = bench.output(m * 3 * width);
    const auto* input = bench.tensor(x);
    const auto* dy = bench.tensor(Doubles(m * inner, 0.375));
    const auto* w = bench.tensor(weight);
    bench.run(Linear{in, out, input, w, bench.tensor(bias), nullptr, y});
    bench.run(LinearBackwardInput{in, out, dy, w, dx});
    bench.run(Attention{input, attention, nullptr});
    bench.run(AttentionBackward{input, attention, nullptr, input, dqkv});
    // Exact before gelu: columns of the input, copied.
    Doubles copies(width * inner, 0.0);
    for (std::size_t j = 0; j < inner; ++j) copies[j % width * inner + j] = 1;
    std::byte *before = bench.output(m * inner), *gelu = bench.output(m * inner);
    bench.run(LinearGelu{in, out, input, bench.tensor(copies), bench.tensor(Doubles(inner, 0.0)), before, gelu});
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

TEST_P(HostOpsRoundingTest, RowsAreFp32RowsRoundedOnce) {
  Bench wide(odd_shape(DType::kFloat32), host_variant("", DType::kFloat32, GemmPath::kFloat32), 1),
      half(odd_shape(GetParam()), host_variant("", GetParam(), GemmPath::kFloat32), 1);
  Random random(GetParam());
  const Shape& shape = wide.shape;
  const std::size_t m = shape.tokens(), width = shape.width, inner = shape.inner, head = width / shape.heads;
  const auto x = random.values(m * width), dout = random.values(m * width), gate_up = random.values(m * 2 * inner);
  const auto weight = random.values(width), table = random.values(shape.sequence * head);
  const auto run = [&](Bench& bench) {
    const auto *input = bench.tensor(x), *d = bench.tensor(dout), *w = bench.tensor(weight);
    std::byte *y = bench.output(m * width), *dx = bench.tensor(dout), *dw = bench.output(width);
    std::byte *turned = bench.tensor(x), *sum = bench.output(m * width);
    float* statistics = bench.floats(m);
    bench.run(RmsNorm{input, width, w, y, width, statistics, 1, shape.width, 1});
    bench.run(RmsNormBackward{input, width, w, d, width, statistics, dx, dx, width, dw, bench.shape.type, false, 1,
                              shape.width, 1});
    const auto head32 = static_cast<std::uint32_t>(head);
    bench.run(Rotary{turned, width, shape.heads, head32, head32, bench.fp32_tensor(table), nullptr});
    bench.run(Add{input, d, sum});
    Doubles all;
    const auto keep = [&](const void* memory, std::size_t count) {
      const auto values = bench.read(memory, count);
      all.insert(all.end(), values.begin(), values.end());
    };
    for (const auto* memory : {y, dx, turned, sum}) keep(memory, m * width);
    keep(dw, width);
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu}) {
      std::byte *gates = bench.tensor(gate_up), *gated = bench.output(m * inner);
      bench.run(GatedActivation{gates, gated, activation});
      bench.run(GatedActivationBackward{gates, bench.tensor(Doubles(m * inner, 0.375)), gates, activation});
      keep(gated, m * inner);
      keep(gates, m * 2 * inner);
    }
    return all;
  };
  const auto expected = run(wide), result = run(half);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(result[i], FakeEngine::rounded(static_cast<float>(expected[i]), GetParam())) << i;
  }
}

}  // namespace

std::vector<Variant> ops_variants() {
  std::vector<Variant> all = {host_variant("fp32", DType::kFloat32, GemmPath::kFloat32),
                              host_variant("bf16_widened", DType::kBFloat16, GemmPath::kFloat32),
                              host_variant("fp16", DType::kFloat16, GemmPath::kFloat32)};
  if (__builtin_cpu_supports("avx512bf16")) {
    all.push_back(host_variant("bf16_native", DType::kBFloat16, GemmPath::kBFloat16));
  }
  return all;
}

std::string why_not() { return {}; }

}  // namespace spillway::models
