// What each operation of a decoder takes on the host device: a layer's, forward and backward, and the head with its
// loss.
//
//   decoder_bench SHAPE TYPE TOKENS THREADS [REPEATS [NAME]]
//   decoder_bench --peak TYPE THREADS
//
// SHAPE: tiny, qwen (Qwen3-0.6B), llama (Llama-3.2-1B). NAME: operations whose names begin so, no others.
// One JSON line per operation: its fastest seconds, how often a step of the whole model has it, the arithmetic of its
// products and the rate. Attention counts half of T² and, backward, its scores once more. The last line adds them all
// up, as a step without its optimizer and the rows that are pushed. --peak prints the fastest panel product, all
// threads at once: what the others are to be compared with.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>
#include <thread>
#include <vector>

#include "spillway/engine.h"
#include "spillway/units.h"
#include "tools/models/ops/ops.h"
#include "tools/models/ops/panel_gemm.h"

namespace spillway::models {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Model {
  Shape shape;
  unsigned layers;
  bool head_norms;
};

Model model_of(std::string_view name) {
  Shape shape{.epsilon = 1e-6f};
  if (name == "qwen") {
    shape.width = 1024, shape.heads = 16, shape.key_heads = 8, shape.head_size = 128, shape.inner = 3072;
    shape.vocabulary = 151936;
    return {shape, 28, true};
  }
  if (name == "llama") {
    shape.width = 2048, shape.heads = 32, shape.key_heads = 8, shape.head_size = 64, shape.inner = 8192;
    shape.vocabulary = 128256;
    return {shape, 16, false};
  }
  shape.width = 64, shape.heads = 4, shape.key_heads = 2, shape.head_size = 16, shape.inner = 128;
  shape.vocabulary = 512;
  return {shape, 2, true};
}

void print_peak(DType type, unsigned threads) {
  const bool half = choose_gemm_path(type) == GemmPath::kBFloat16;
  const PanelGemm::Shape product{256, 1024, half ? DType::kBFloat16 : DType::kFloat32, false};
  PanelGemm gemm(threads);
  gemm.prepare(product);
  constexpr int kCalls = 256, kRepeats = 12;
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::vector<double> seconds(threads);
    std::vector<std::thread> workers;
    for (unsigned slot = 0; slot < threads; ++slot) {
      workers.emplace_back([&, slot] {
        std::vector<float> a(product.m * product.k, 0.5f), panel(product.k * kPanel, 0.5f), c(product.m * kPanel);
        std::vector<std::byte> pad(gemm.scratchpad_bytes() + 64);
        void* aligned = pad.data() + 64 - reinterpret_cast<std::uintptr_t>(pad.data()) % 64;
        const double start = now();
        for (int call = 0; call < kCalls; ++call) gemm.run(product, slot, a.data(), panel.data(), c.data(), aligned);
        seconds[slot] = now() - start;
      });
    }
    for (auto& worker : workers) worker.join();
    best = std::min(best, *std::max_element(seconds.begin(), seconds.end()));
  }
  const double flops = 2.0 * static_cast<double>(product.m * product.k * kPanel) * kCalls * threads;
  fmt::print("{{\"bench\":\"decoder\",\"operation\":\"panels\",\"type\":\"{}\",\"threads\":{},\"gflops\":{:.1f}}}\n",
             name_of(type), threads, flops / best * 1e-9);
}

class Measured {
 public:
  Measured(const Model& model, unsigned threads, int repeats, std::string_view name)
      : model_(model),
        shape_(model.shape),
        ops_(create_host_ops(model.shape, threads)),
        repeats_(repeats),
        name_(name) {
    ModelDescription description;
    description.blocks = {{.name = "unused", .parameters = {{.name = "unused", .shape = {64}}}}};
    description.workspace_bytes = bytes();
    Config config;
    config.weights = shape_.type;
    config.threads = threads;
    engine_ = Engine::create(config, description);
    ops_->bind(*engine_, engine_->workspace().first(ops_->scratch_bytes()));
    next_ = engine_->workspace().data() + align_up<std::uint64_t>(ops_->scratch_bytes(), 4096);
  }

  void layer() {
    const std::size_t m = shape_.tokens(), width = shape_.width, inner = shape_.inner, head = shape_.head_width();
    const std::size_t query = shape_.query_width(), key = shape_.kv_heads() * head, qkv = shape_.qkv_width();
    std::byte *x = tensor(m * width), *y = tensor(m * width), *wide = tensor(m * 2 * inner), *one = tensor(m * inner);
    std::byte *in = tensor(m * qkv), *out = tensor(m * query), *din = tensor(m * qkv), *scales = tensor(inner);
    std::byte *weight = tensor(width * inner), *gradient = tensor(width * inner);
    float* statistics = floats(m * shape_.heads);
    float* table = floats(m * head);
    float* log_sums = floats(std::max<std::size_t>(ops_->attention_log_sums(), 1));
    const auto product = [&](const char* name, std::size_t from, std::size_t to, const void* a, void* b, double times) {
      const auto i = static_cast<std::uint32_t>(from), o = static_cast<std::uint32_t>(to);
      const double flops = 2.0 * static_cast<double>(m * from * to);
      run(fmt::format("{} forward", name), times, flops,
          Linear{.in = i,
                 .out = o,
                 .x = a,
                 .weight = weight,
                 .bias = nullptr,
                 .residual = nullptr,
                 .y = b,
                 .layout = Layout::kOutIn});
      run(fmt::format("{} input gradient", name), times, flops,
          LinearBackwardInput{
              .in = i, .out = o, .dy = b, .weight = weight, .dx = const_cast<void*>(a), .layout = Layout::kOutIn});
      run(fmt::format("{} weight gradient", name), times, flops,
          LinearBackwardWeight{.in = i,
                               .out = o,
                               .x = a,
                               .dy = b,
                               .dweight = gradient,
                               .dbias = nullptr,
                               .gradient = shape_.type,
                               .accumulate = false,
                               .layout = Layout::kOutIn});
    };
    product("query", width, query, x, out, 1);
    product("key, value", width, key, x, out, 2);
    product("attention out", query, width, out, x, 1);
    product("gate, up", width, inner, x, one, 2);
    product("down", inner, width, one, x, 1);
    const double scores = static_cast<double>(m) * static_cast<double>(shape_.sequence) * static_cast<double>(query);
    run("attention forward", 1, 2 * scores, Attention{in, out, log_sums});
    run("attention backward", 1, 5 * scores, AttentionBackward{in, out, log_sums, out, din});
    const auto norm = [&](const char* name, std::size_t groups, std::size_t columns, std::size_t stride, void* from,
                          void* to, double times) {
      const auto g = static_cast<std::uint32_t>(groups), c = static_cast<std::uint32_t>(columns);
      run(fmt::format("{} forward", name), times, 0,
          RmsNorm{.x = from,
                  .x_stride = stride,
                  .weight = scales,
                  .out = to,
                  .out_stride = stride,
                  .statistics = statistics,
                  .groups = g,
                  .columns = c});
      run(fmt::format("{} backward", name), times, 0,
          RmsNormBackward{.x = from,
                          .x_stride = stride,
                          .weight = scales,
                          .dout = to,
                          .dout_stride = stride,
                          .statistics = statistics,
                          .residual = groups == 1 ? to : nullptr,
                          .dx = to,
                          .dx_stride = stride,
                          .dweight = gradient,
                          .gradient = shape_.type,
                          .accumulate = false,
                          .groups = g,
                          .columns = c});
    };
    norm("norm", 1, width, width, x, y, 2);
    if (model_.head_norms) norm("head norm", shape_.heads, head, qkv, in, din, 1.5);
    run("rotary", 2, 0,
        Rotary{.x = in,
               .stride = qkv,
               .heads = shape_.heads + shape_.kv_heads(),
               .head_width = static_cast<std::uint32_t>(head),
               .rotated = static_cast<std::uint32_t>(head),
               .table = table,
               .positions = nullptr});
    run("gate forward", 1, 0, GatedActivation{wide, one, Activation::kSilu});
    run("gate backward", 1, 0, GatedActivationBackward{wide, one, wide, Activation::kSilu});
  }

  void head() {
    const std::size_t m = shape_.tokens(), width = shape_.width, words = shape_.vocabulary;
    std::byte *x = tensor(m * width), *dx = tensor(m * width), *weight = tensor(words * width);
    float *gradient = floats(words * width), *losses = floats(m);
    auto* targets = reinterpret_cast<std::uint32_t*>(take(m * sizeof(std::uint32_t)));
    for (std::size_t i = 0; i < m; ++i) targets[i] = static_cast<std::uint32_t>(i * 7919 % words);
    const double flops = 2.0 * static_cast<double>(m * width) * static_cast<double>(words);
    layers_ = 1;
    run("head", 1, 3 * flops,
        HeadLoss{.x = x,
                 .targets = targets,
                 .token_weight = weight,
                 .scale = 1e-3f,
                 .losses = losses,
                 .dx = dx,
                 .dtoken_weight = gradient,
                 .accumulate = false});
  }

  void total() const {
    fmt::print("{{\"bench\":\"decoder\",\"operation\":\"all\",\"seconds\":{:.4f},\"gflops\":{:.1f}}}\n", seconds_,
               flops_ / seconds_ * 1e-9);
  }

 private:
  std::uint64_t bytes() const {
    const std::uint64_t m = shape_.tokens(), words = shape_.vocabulary, width = shape_.width;
    const std::uint64_t layer = m * (4 * width + 3 * shape_.inner + 3 * shape_.qkv_width()) + 3 * width * shape_.inner;
    return ops_->scratch_bytes() + (layer + 2 * m * width + 2 * words * width + m * 1024) * 4 + kMiB;
  }
  std::byte* take(std::uint64_t bytes) {
    std::byte* piece = next_;
    next_ += align_up<std::uint64_t>(bytes, 4096);
    SPILLWAY_CHECK(next_ <= engine_->workspace().data() + engine_->workspace().size(), "bytes() counts them all");
    return piece;
  }
  // Small numbers of both signs.
  std::byte* tensor(std::uint64_t elements) {
    std::byte* piece = take(elements * size_of(shape_.type));
    std::uint32_t state = 1;
    for (std::uint64_t i = 0; i < elements; ++i) {
      state = state * 1664525u + 1013904223u;
      const float value = (static_cast<float>(state >> 8) * 0x1p-24f - 0.5f) * 0.125f;
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      if (shape_.type == DType::kFloat32)
        std::memcpy(piece + 4 * i, &bits, 4);
      else  // a bf16 is the upper half of an fp32
        std::memcpy(piece + 2 * i, reinterpret_cast<const std::byte*>(&bits) + 2, 2);
    }
    return piece;
  }
  float* floats(std::uint64_t count) { return reinterpret_cast<float*>(take(count * sizeof(float))); }

  template <typename Operation>
  void run(std::string_view name, double times, double flops, const Operation& operation) {
    if (!name.starts_with(name_)) return;
    double best = 1e9;
    for (int repeat = 0; repeat <= repeats_; ++repeat) {
      const double start = now();
      ops_->run(operation, engine_->stream());
      engine_->stream().synchronize();
      best = std::min(best, now() - start);
    }
    seconds_ += best * times * layers_;
    flops_ += flops * times * layers_;
    fmt::print("{{\"bench\":\"decoder\",\"operation\":\"{}\",\"seconds\":{:.6f},\"times\":{},\"gflops\":{:.1f}}}\n",
               name, best, times * layers_, flops / best * 1e-9);
  }

  Model model_;
  Shape shape_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Engine> engine_;
  std::byte* next_ = nullptr;
  int repeats_;
  std::string_view name_;
  double seconds_ = 0, flops_ = 0, layers_ = model_.layers;
};

}  // namespace
}  // namespace spillway::models

int main(int argc, char** argv) {
  using namespace spillway;
  using namespace spillway::models;
  const auto type_of = [](std::string_view name) { return name == "bf16" ? DType::kBFloat16 : DType::kFloat32; };
  const auto number = [&](int index) { return static_cast<unsigned>(std::strtoul(argv[index], nullptr, 10)); };
  if (argc == 4 && std::string_view(argv[1]) == "--peak") {
    print_peak(type_of(argv[2]), number(3));
    return 0;
  }
  if (argc < 5) {
    fmt::print(stderr,
               "decoder_bench tiny|qwen|llama fp32|bf16 TOKENS THREADS [REPEATS [NAME]], or --peak TYPE THREADS\n");
    return 2;
  }
  Model model = model_of(argv[1]);
  model.shape.type = type_of(argv[2]);
  model.shape.sequence = number(3);
  Measured measured(model, number(4), argc > 5 ? static_cast<int>(number(5)) : 5, argc > 6 ? argv[6] : "");
  measured.layer();
  measured.head();
  measured.total();
}
