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
  void write_values(ParameterValues, std::uint32_t, std::uint32_t, const WeightSource&) override { refuse(); }

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

}  // namespace

// In 16 bits tensor cores add products with fewer guard bits than fp32 has; probabilities and gradients of scores and
// logits are rounded to the tensor type where they enter a product, terms of a sum each off by up to half an ulp;
// cuBLASLt rounds products of unaligned rows before it adds their bias, as seen on an H100; and gelu behind a product
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
