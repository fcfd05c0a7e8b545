// What cuBLASLt reaches on this GPU, as the trainer plans its products. One JSON line each:
//
//   cuda_product  a large product in bf16, the limit that a model's operations are compared with: alone, as a GPU does
//                 it that was idle before ("large"), and one after the other for seconds, with the clock that its power
//                 allows then ("large, sustained"). Those of gpt2-xl's layers for 8 rows of 1,024 tokens, and of its
//                 head for a slice of 1,024 tokens, whose 50,257 words are beside 50,304. `of_limit` is the share of
//                 the large one's rate.
//   cuda_fusion   what the trainer can have computed inside a product (finetune --fuse): `inside_us`, against
//   `apart_us`
//                 for the product and the trainer's own kernel after it; `product_us` of that is the product's.
//                 `inside_us` null: cuBLASLt has none, and `why` is its answer.
//
// Operands are normally distributed: a GPU multiplies zeros faster.
//
//   cuda_product_bench [--tiny | --large]     --large: the large product alone
//
// Without a GPU it says so and does nothing.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda_timing.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "tools/models/ops/cuda/gemm.h"
#include "tools/models/ops/cuda/layer_kernels.h"

namespace spillway::models {
namespace {

using bench::check;

struct Sizes {
  std::uint64_t large, tokens, width, words, slice;
  double sustained_seconds;
};
constexpr Sizes kXl{8192, 8192, 1600, 50257, 1024, 1}, kTiny{32, 16, 16, 97, 16, 0};
// Rows of logits are padded to a multiple of it; so many words are compared with, too.
constexpr std::uint64_t kLogitsUnit = 64;

class Bench {
 public:
  // Room for matrices of so many 16-bit elements, five times.
  explicit Bench(std::size_t elements)
      : workspace_(allocate(Gemm::kWorkspaceBytes)), gemm_({workspace_, Gemm::kWorkspaceBytes}) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    // Drawing takes longer than all products: values come again after a prime number of them.
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> values(std::min<std::size_t>(elements, 4'000'037));  // bf16: the upper half of an fp32
    std::ranges::generate(values, [&] { return std::bit_cast<std::uint32_t>(normal(random)) >> 16; });
    for (std::byte*& memory : memory_) {
      memory = allocate(2 * elements);
      for (std::size_t first = 0; first < elements; first += values.size()) {
        const std::size_t bytes = 2 * std::min(values.size(), elements - first);
        check(cudaMemcpy(memory + 2 * first, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
      }
    }
  }
  ~Bench() {
    for (std::byte* memory : memory_) cudaFree(memory);
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void measure(const Product& product) { print(product, std::string(product.name), median_us(gemm_.plan(product))); }

  // As long as `seconds` without a pause, and as long once more, which counts.
  void sustain(const Product& product, double seconds) {
    const PlannedProduct planned = gemm_.plan(product);
    print(product, "large, sustained", bench::sustained_us(stream_, seconds, [&] { return run(planned); }));
  }

  // A product with an epilogue, beside one with `without` and what `behind` enqueues.
  void compare(const char* name, const Product& with, Epilogue without,
               const std::function<cudaError_t(std::byte* result, cudaStream_t)>& behind) {
    Product plain = with;
    plain.epilogue = without;
    const PlannedProduct product = gemm_.plan(plain);
    const double product_us = median_us(product);
    const double apart_us = bench::median_us(stream_, [&] {
      const cudaError_t result = run(product);
      return result == cudaSuccess ? behind(memory_[2], stream_) : result;
    });
    std::string why;
    const std::optional<PlannedProduct> inside = gemm_.find(with, &why);
    const double inside_us = inside ? median_us(*inside) : 0;
    fmt::print(
        "{{\"bench\": \"cuda_fusion\", \"product\": \"{}\", \"rows\": {}, \"columns\": {}, \"depth\": {}, "
        "\"product_us\": {:.1f}, \"apart_us\": {:.1f}, {}}}\n",
        name, with.rows, with.columns, with.depth, product_us, apart_us,
        inside ? fmt::format("\"inside_us\": {:.1f}, \"of_apart\": {:.3f}", inside_us, inside_us / apart_us)
               : fmt::format("\"inside_us\": null, \"why\": \"{}\"", why));
  }
  // y = x · weight + bias, without and with the residual added.
  void compare_residual(const Product& product) {
    const PlannedProduct planned = gemm_.plan(product);
    ProductMemory memory = memory_of();
    const double without = median_us(planned);
    memory.c = memory_[3];
    memory.beta = 1;
    const double with = bench::median_us(stream_, [&] {
      gemm_.run(planned, memory, stream_);
      return cudaGetLastError();
    });
    print(product, std::string(product.name), without);
    print(product, std::string(product.name) + ", residual", with);
  }

  // A product's first operand; and memory beside operands and result: an activation, and sums.
  const std::byte* first() const { return memory_[0]; }
  std::byte* other() const { return memory_[3]; }
  std::byte* sums() const { return memory_[4]; }

 private:
  static std::byte* allocate(std::size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }
  ProductMemory memory_of() const {
    return {.a = memory_[0], .b = memory_[1], .d = memory_[2], .bias = memory_[4], .aux = memory_[3]};
  }
  cudaError_t run(const PlannedProduct& planned) const {
    gemm_.run(planned, memory_of(), stream_);
    return cudaGetLastError();
  }
  double median_us(const PlannedProduct& planned) const {
    return bench::median_us(stream_, [&] { return run(planned); });
  }
  void print(const Product& product, const std::string& name, double us) {
    const double tflops = 2e-6 * static_cast<double>(product.rows) * static_cast<double>(product.columns) *
                          static_cast<double>(product.depth) / us;
    if (limit_ == 0) limit_ = tflops;
    fmt::print(
        "{{\"bench\": \"cuda_product\", \"product\": \"{}\", \"rows\": {}, \"columns\": {}, \"depth\": {}, \"us\": "
        "{:.1f}, \"tflops\": {:.4g}, \"of_limit\": {:.3f}}}\n",
        name, product.rows, product.columns, product.depth, us, tflops, tflops / limit_);
  }

  std::byte* workspace_;
  Gemm gemm_;
  cudaStream_t stream_ = nullptr;
  std::byte* memory_[5] = {};
  double limit_ = 0;
};

constexpr DType kType = DType::kBFloat16;

void bench_large(Bench& bench, const Sizes& sizes) {
  const std::uint64_t n = sizes.large;
  const Product large{"large", n, n, n, kType, kType, {false, n}, {false, n}, n};
  bench.measure(large);
  bench.sustain(large, sizes.sustained_seconds);
}

// The layouts are the trainer's: tools/models/ops/cuda/cuda_ops_products.cc.
struct Layer {
  const char* name;
  std::uint64_t in, out, tokens;

  Product forward(const char* what) const {
    return {what, out, tokens, in, kType, kType, {false, out}, {false, in}, out};
  }
  Product backward(const char* what) const {
    return {what, in, tokens, out, kType, kType, {true, out}, {false, out}, in};
  }
  Product weight(const char* what) const {
    return {what, out, in, tokens, kType, kType, {false, out}, {true, in}, out};
  }
};

std::vector<Layer> layers_of(const Sizes& sizes) {
  const std::uint64_t width = sizes.width, tokens = sizes.tokens;
  return {{"q, k, v", width, 3 * width, tokens},
          {"attention out", width, width, tokens},
          {"up", width, 4 * width, tokens},
          {"down", 4 * width, width, tokens}};
}

void bench_layers(Bench& bench, const Sizes& sizes) {
  for (const Layer& layer : layers_of(sizes)) {
    const std::string name = layer.name, backward = name + ": input's gradient", weight = name + ": weight's gradient";
    bench.measure(layer.forward(layer.name));
    bench.measure(layer.backward(backward.c_str()));
    bench.measure(layer.weight(weight.c_str()));
  }
}

void bench_head(Bench& bench, const Sizes& sizes) {
  const std::uint64_t width = sizes.width, slice = sizes.slice, stride = align_up(sizes.words, kLogitsUnit);
  for (const std::uint64_t words :
       {sizes.words, stride, sizes.words - sizes.words % kLogitsUnit, sizes.words % kLogitsUnit}) {
    const std::string logits = fmt::format("head of {}: logits", words), dx = fmt::format("head of {}: dx", words),
                      weight = fmt::format("head of {}: weight's gradient", words);
    const DType sum = DType::kFloat32;
    bench.measure({logits.c_str(), words, slice, width, kType, sum, {true, width}, {false, width}, stride});
    bench.measure({dx.c_str(), width, slice, words, kType, kType, {false, width}, {false, 2 * stride}, width});
    bench.measure({weight.c_str(), width, words, slice, kType, sum, {false, width}, {true, 2 * stride}, width});
  }
}

void bench_fusions(Bench& bench, const Sizes& sizes) {
  const std::vector<Layer> layers = layers_of(sizes);
  const std::uint64_t inner = 4 * sizes.width * sizes.tokens;
  for (const Layer& layer : layers) {
    if (layer.out == 4 * layer.in) {
      Product up = layer.forward("up, bias and gelu");
      up.epilogue = Epilogue::kGelu;
      bench.compare("up, bias and gelu", up, Epilogue::kBias, [&](std::byte* result, cudaStream_t stream) {
        return gelu(kType, result, bench.other(), inner, stream);
      });
    }
    if (layer.in == 4 * layer.out) {
      Product down = layer.backward("down: input's gradient, gelu's");
      down.epilogue = Epilogue::kGeluBackward;
      bench.compare("down: input's gradient, gelu's", down, Epilogue::kNone,
                    [&](std::byte* result, cudaStream_t stream) {
                      return gelu_backward(kType, bench.other(), result, inner, stream);
                    });
    }
  }
  std::byte* const scratch = bench.other();
  for (const Layer& layer : layers) {
    const std::string name = std::string(layer.name) + ": weight's gradient, bias's";
    Product weight = layer.weight(name.c_str());
    weight.epilogue = Epilogue::kBiasGradient;
    bench.compare(name.c_str(), weight, Epilogue::kNone, [&](std::byte*, cudaStream_t stream) {
      return column_sums({kType, bench.first(), layer.tokens, layer.out, layer.out, {bench.sums(), kType, false}},
                         scratch, stream);
    });
  }
  for (const Layer& layer : layers) {
    if (layer.out != sizes.width) continue;
    const std::string name = std::string(layer.name) + ", bias";
    Product forward = layer.forward(name.c_str());
    forward.epilogue = Epilogue::kBias;
    bench.compare_residual(forward);
  }
}

}  // namespace
}  // namespace spillway::models

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what has been measured stays when it is ended
  using namespace spillway::models;
  int devices = 0;
  if (const cudaError_t why = cudaGetDeviceCount(&devices); why != cudaSuccess || devices == 0) {
    fmt::print("skipped: no GPU: {}\n", cudaGetErrorString(why));
    return 77;
  }
  const bool large = argc > 1 && std::strcmp(argv[1], "--large") == 0;
  const Sizes& sizes = argc > 1 && !large ? kTiny : kXl;
  const std::uint64_t stride = spillway::align_up(sizes.words, kLogitsUnit);
  try {
    Bench bench(large ? sizes.large * sizes.large
                      : std::max({sizes.large * sizes.large, 4 * sizes.width * std::max(sizes.tokens, sizes.width),
                                  2 * stride * std::max(sizes.slice, sizes.width)}));
    bench_large(bench, sizes);
    if (large) return 0;
    bench_layers(bench, sizes);
    bench_head(bench, sizes);
    bench_fusions(bench, sizes);
  } catch (const spillway::Error& error) {
    fmt::print(stderr, "cuda_product_bench: {}\n", error.what());
    return 1;
  }
}
