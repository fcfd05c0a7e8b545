// The operations of the `cuda` device: the suite on a GPU, through the plugin, in an arena of its own. Skips, saying
// why, where there is no GPU.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <utility>

#include "tests/tools/models/ops_suite.h"

namespace spillway::models {
namespace {

void check(cudaError_t result) { SPILLWAY_CHECK(result == cudaSuccess, cudaGetErrorString(result)); }

class GpuStream final : public Stream {
 public:
  GpuStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~GpuStream() override { cudaStreamDestroy(stream_); }
  DeviceKind kind() const noexcept override { return DeviceKind::kCuda; }
  void* native() const noexcept override { return stream_; }
  void launch(const HostTask&) override { SPILLWAY_CHECK(false, "a GPU runs no host tasks"); }
  void synchronize() override { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// An arena and a stream; there is no model.
class GpuEngine final : public Engine {
 public:
  explicit GpuEngine(std::size_t workspace_bytes, std::size_t arena_bytes) : bytes_(workspace_bytes + arena_bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes_));
    arena_ = static_cast<std::byte*>(memory);
    // Whatever is read before it is written shows.
    check(cudaMemset(arena_, 0xff, bytes_));
    check(cudaDeviceSynchronize());
    workspace_ = {arena_, workspace_bytes};
    used_ = workspace_bytes;
  }
  ~GpuEngine() override { cudaFree(arena_); }

  std::byte* allocate(std::size_t bytes) {
    used_ = align_up<std::size_t>(used_, 64);
    SPILLWAY_CHECK(used_ + bytes <= bytes_, "the test asked for a larger arena");
    return arena_ + std::exchange(used_, used_ + bytes);
  }

  DeviceKind device_kind() const override { return DeviceKind::kCuda; }
  Stream& stream() override { return stream_; }
  std::span<std::byte> workspace() override { return workspace_; }
  bool in_hbm(const void* data, std::size_t bytes) const override {
    const auto* begin = static_cast<const std::byte*>(data);
    return begin >= arena_ && begin + bytes <= arena_ + bytes_;
  }

  std::uint64_t current_step() const override { return 0; }
  double loss_scale() const override { return 1; }
  double next_learning_rate() const override { return 0; }
  std::vector<std::byte> blob() const override { return {}; }
  const Ledger& ledger() const override { return ledger_; }
  std::vector<std::string> describe() const override { return {}; }
  std::optional<double> predicted_step_seconds() const override { return std::nullopt; }
  void import_weights(const WeightSource&) override { refuse(); }
  std::unique_ptr<Stream> adopt_stream(void*) override { refuse(); }
  Lease acquire(std::uint32_t, Pass, Stream&) override { refuse(); }
  ActivationLease acquire_activation(std::uint32_t, Access, Stream&) override { refuse(); }
  Insides insides(std::uint32_t) override { refuse(); }
  void push_gradient(const Gradient&, Stream&) override { refuse(); }
  StepReport step(std::span<const std::byte>) override { refuse(); }
  void discard_step() override { refuse(); }
  void set_micro_batches(std::uint32_t) override { refuse(); }
  void set_learning_rate(double) override { refuse(); }
  void set_betas(double, double) override { refuse(); }
  void flush() override { refuse(); }
  void export_weights(bool, const WeightSink&) override { refuse(); }
  void begin_save(const std::filesystem::path&, const SaveOptions&) override { refuse(); }
  void finish_save() override { refuse(); }
  void load_snapshot(const std::filesystem::path&) override { refuse(); }
  void read_values(ParameterValues, std::uint32_t, std::uint32_t, const WeightSink&) override { refuse(); }
  void write_values(ParameterValues, std::uint32_t, std::uint32_t, std::span<const float>, std::uint32_t) override {
    refuse();
  }

 protected:
  const void* weight_address(std::uint32_t, std::uint32_t) const override { refuse(); }
  void release(std::uint32_t, Stream&) override { refuse(); }
  void release_activation(std::uint32_t, Stream&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { check_failed(__FILE__, __LINE__, "engine", "operations need no model"); }

  GpuStream stream_;
  Ledger ledger_;
  std::size_t bytes_, used_ = 0;
  std::byte* arena_ = nullptr;
  std::span<std::byte> workspace_;
};

class GpuMachine final : public OpsMachine {
 public:
  explicit GpuMachine(const Shape& shape, Fusion fusion = Fusion::kAuto)
      : ops_(create_ops(DeviceKind::kCuda, shape, 1, fusion)),
        engine_(align_up<std::size_t>(ops_->scratch_bytes(), 4096), 128 << 20) {
    ops_->bind(engine_, engine_.workspace());
  }
  Ops& ops() override { return *ops_; }
  Stream& stream() override { return engine_.stream(); }
  std::byte* allocate(std::size_t bytes) override { return engine_.allocate(bytes); }
  void put(const void* from, void* to, std::size_t bytes) override { copy(to, from, bytes); }
  void get(const void* from, void* to, std::size_t bytes) override { copy(to, from, bytes); }

 private:
  void copy(void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(engine_.stream().native())));
    engine_.stream().synchronize();
  }
  std::unique_ptr<Ops> ops_;
  GpuEngine engine_;
};

Variant gpu_variant(const char* name, DType type, const Tolerances& tolerances, Fusion fusion = Fusion::kAuto) {
  return {.name = name, .type = type, .tolerances = tolerances, .create = [fusion](const Shape& shape, unsigned) {
            return std::make_unique<GpuMachine>(shape, fusion);
          }};
}

class GpuOpsDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
  }
};

// The driver would take it, and make the stream wait for a copy of its own.
TEST_F(GpuOpsDeathTest, PageableMemoryIsRefused) {
  GpuMachine machine(odd_shape(DType::kFloat32));
  std::vector<std::byte> pageable(4096);
  std::byte* device = machine.allocate(pageable.size());
  EXPECT_DEATH(machine.ops().upload(pageable.data(), device, pageable.size(), machine.stream()), "registered memory");
  EXPECT_DEATH(machine.ops().download(device, pageable.data(), pageable.size(), machine.stream()), "registered memory");
}

TEST_F(GpuOpsDeathTest, TensorsThatAreNotAlignedAreRefused) {
  GpuMachine machine(odd_shape(DType::kFloat32));
  std::byte* memory = machine.allocate(1 << 20);
  float* statistics = reinterpret_cast<float*>(machine.allocate(1 << 16));
  EXPECT_DEATH(machine.ops().run(LayerNorm{memory + 8, memory, memory, memory, statistics}, machine.stream()),
               "aligned to 16 bytes");
}

// Inside a product gelu sees its argument before that is rounded to 16 bits.
TEST(GpuFusion, GeluIsComputedWhereItWasAskedFor) {
  if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
  const Shape shape = even_shape(DType::kBFloat16);
  const std::size_t m = shape.tokens(), in = shape.width, out = shape.inner;
  Random random(shape.type);
  const Doubles x = random.values(m * in), weight = random.values(in * out, 0.1), bias = random.values(out);
  std::string said;
  const auto after = [&](Fusion fusion) {
    Bench bench(shape, gpu_variant("", shape.type, {}, fusion), 1);
    std::byte *before = bench.output(m * out), *result = bench.output(m * out);
    bench.run(LinearGelu{shape.width, shape.inner, bench.tensor(x), bench.tensor(weight), bench.tensor(bias), before,
                         result});
    said = bench.machine->ops().describe().front();
    return bench.read_bytes(result, 2 * m * out);
  };
  const auto apart = after(Fusion::kNone);
  EXPECT_NE(said.find(" biases inside"), std::string::npos) << said;
  const auto inside = after(Fusion::kGelu);
  EXPECT_NE(said.find(" biases and gelu inside"), std::string::npos) << said;
  EXPECT_NE(apart, inside);
  EXPECT_EQ(inside, after(Fusion::kAll));
  EXPECT_NE(said.find("bias gradients inside"), std::string::npos) << said;
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, 0));
  EXPECT_EQ(after(Fusion::kAuto), gpu.major == 9 || gpu.major == 10 ? inside : apart) << said;
}

// What a model that writes text asks for: a row, in pieces of any length, one token at a time in the end, and the
// logits of each piece's last token.
TEST(GpuForwardAlone, PiecesOfARowAreTheRow) {
  if (const std::string why = why_not(); !why.empty()) GTEST_SKIP() << why;
  for (const Variant& variant : ops_variants()) {
    SCOPED_TRACE(variant.name);
    Shape shape{.type = variant.type,
                .batch = 1,
                .sequence = 100,
                .width = 72,
                .heads = 4,
                .inner = 40,
                .vocabulary = 203,
                .key_heads = 2,
                .head_size = 32,
                .slice = 64,
                .forward_alone = true};
    Bench bench(shape, variant, 1);
    Random random(shape.type);
    const std::uint32_t pieces[] = {37, 1, 60, 1, 1};
    const std::size_t m = shape.sequence, width = shape.width, qkv_width = shape.qkv_width(), words = shape.vocabulary;
    const std::size_t query = shape.query_width(), key = query / 2, element = size_of(shape.type);
    const auto x = random.values(m * width, 0.5), table = random.values(words * width, 0.5);
    const auto weight = random.values(query * width, 0.5), qkv = random.values(m * qkv_width);
    const auto *x_device = bench.tensor(x), *table_device = bench.tensor(table), *weight_device = bench.tensor(weight);
    const auto* qkv_device = bench.tensor(qkv);
    std::byte *y = bench.output(m * query), *out = bench.output(m * query);
    // Keys and values of the row, as far as it goes.
    std::byte* pairs = bench.output(m * 2 * key);
    float *logits[5], *log_sums = bench.log_sums();
    for (float*& of_piece : logits) of_piece = bench.floats(words);
    for (std::uint32_t first = 0, i = 0; i < 5; first += pieces[i++]) {
      const std::uint32_t count = pieces[i];
      const std::byte* rows = x_device + first * width * element;
      bench.run(Linear{.in = shape.width,
                       .out = static_cast<std::uint32_t>(query),
                       .x = rows,
                       .weight = weight_device,
                       .bias = nullptr,
                       .residual = nullptr,
                       .y = y + first * query * element,
                       .layout = Layout::kOutIn,
                       .count = count});
      const std::byte* own = qkv_device + first * qkv_width * element;
      bench.run(CopyRows{own + query * element, qkv_width, pairs + first * 2 * key * element, 2 * key,
                         static_cast<std::uint32_t>(2 * key), count});
      bench.run(Attention{
          .qkv = own,
          .out = out + first * query * element,
          .log_sums = log_sums,
          .rules = {.window = 30, .soft_cap = 5},
          .part = {.keys = pairs, .values = pairs + key * element, .stride = 2 * key, .first = first, .count = count}});
      bench.run(Logits{rows + (count - 1) * width * element, table_device, logits[i], 4.0f, 1});
    }
    const auto products = product(
        m, query, width, [&](auto i, auto k) { return x[i * width + k]; },
        [&](auto k, auto j) { return weight[j * width + k]; });
    expect_close(bench.read(y, m * query), products, shape.type, variant.tolerances.product, "y");
    const auto expected = attention_reference(shape, qkv, Doubles(m * query, 0.0), {.window = 30, .soft_cap = 5});
    expect_close(bench.read(out, m * query), expected.out, shape.type, variant.tolerances.attention, "out");
    for (std::size_t i = 0, last = 0; i < 5; ++i) {
      last += pieces[i];
      Doubles capped;
      for (std::size_t word = 0; word < words; ++word) {
        double sum = 0;
        for (std::size_t c = 0; c < width; ++c) sum += x[(last - 1) * width + c] * table[word * width + c];
        capped.push_back(4 * std::tanh(sum / 4));
      }
      expect_close(bench.read(logits[i], words, DType::kFloat32), capped, DType::kFloat32, variant.tolerances.product,
                   "logits");
    }
  }
}

}  // namespace

// In 16 bits tensor cores add products with fewer guard bits than fp32 has; probabilities and gradients of scores and
// logits are rounded to the tensor type where they enter a product, terms of a sum each off by up to half an ulp;
// cuBLASLt rounds products of unaligned rows before it adds their bias, as seen on an H100; and gelu after a product
// may take the GPU's approximate tanh, off by 2^-11, which its derivative multiplies by up to 10.
std::vector<Variant> ops_variants() {
  const Tolerances bf16{.product = 2e-5,
                        .gelu = 2e-3,
                        .gelu_backward = 3e-2,
                        .attention = 8e-2,
                        .head = 2e-2,
                        .dlogits = DType::kBFloat16,
                        .rounds_before_bias = true};
  return {gpu_variant("fp32", DType::kFloat32, {.product = 1e-5, .attention = 2e-5, .head = 3e-5}),
          gpu_variant("bf16", DType::kBFloat16, bf16),
          gpu_variant("bf16_all_fused", DType::kBFloat16, bf16, Fusion::kAll),
          gpu_variant("fp16", DType::kFloat16,
                      {.product = 2e-5,
                       .gelu = 2e-3,
                       .gelu_backward = 3e-2,
                       .attention = 1e-2,
                       .head = 5e-3,
                       .dlogits = DType::kFloat16,
                       .rounds_before_bias = true})};
}

std::string why_not() {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) return std::string("no GPU: ") + cudaGetErrorString(result);
  return count == 0 ? "no GPU shows itself" : "";
}

}  // namespace spillway::models
