// What cuBLASLt reaches on this GPU, as the trainer plans its products: a large one in bf16, the limit that a model's
// operations are compared with, and those of gpt2-xl's layers for 8 rows of 1,024 tokens. One JSON line each;
// `of_limit` is the share of the large one's rate. Operands are normally distributed: a GPU multiplies zeros faster.
//
//   cuda_product_bench [--tiny]
//
// Without a GPU it says so and does nothing.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "bench/cuda_timing.h"
#include "spillway/error.h"
#include "tools/gpt2/cuda/gemm.h"

namespace spillway::gpt2 {
namespace {

using bench::check;

class Bench {
 public:
  // Room for the largest matrix of `elements`, three times.
  explicit Bench(std::size_t elements)
      : workspace_(allocate(Gemm::kWorkspaceBytes)), gemm_({workspace_, Gemm::kWorkspaceBytes}) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> values(elements);  // bf16: the upper half of an fp32
    std::ranges::generate(values, [&] { return std::bit_cast<std::uint32_t>(normal(random)) >> 16; });
    for (std::byte*& memory : memory_) {
      memory = allocate(2 * elements);
      check(cudaMemcpy(memory, values.data(), 2 * elements, cudaMemcpyHostToDevice), "cudaMemcpy");
    }
  }
  ~Bench() {
    for (std::byte* memory : memory_) cudaFree(memory);
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void measure(const Product& product) {
    const PlannedProduct planned = gemm_.plan(product);
    const double us = bench::median_us(stream_, [&] {
      gemm_.run(planned, {.a = memory_[0], .b = memory_[1], .d = memory_[2]}, stream_);
      return cudaGetLastError();
    });
    const double tflops = 2e-6 * static_cast<double>(product.rows) * static_cast<double>(product.columns) *
                          static_cast<double>(product.depth) / us;
    if (limit_ == 0) limit_ = tflops;
    fmt::print(
        "{{\"bench\": \"cuda_product\", \"product\": \"{}\", \"rows\": {}, \"columns\": {}, \"depth\": {}, \"us\": "
        "{:.1f}, \"tflops\": {:.4g}, \"of_limit\": {:.3f}}}\n",
        product.name, product.rows, product.columns, product.depth, us, tflops, tflops / limit_);
  }

 private:
  static std::byte* allocate(std::size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }

  std::byte* workspace_;
  Gemm gemm_;
  cudaStream_t stream_ = nullptr;
  std::byte* memory_[3] = {};
  double limit_ = 0;
};

// The layouts are the trainer's: tools/gpt2/cuda/cuda_ops.cc.
void bench_products(std::uint64_t large, std::uint64_t tokens, std::uint64_t width) {
  const DType type = DType::kBFloat16;
  Bench bench(std::max(large * large, 4 * width * std::max(tokens, width)));
  bench.measure({"large", large, large, large, type, type, {false, large}, {false, large}, large});
  struct Layer {
    const char *forward, *backward, *weight;
    std::uint64_t in, out;
  };
  for (const Layer& layer :
       {Layer{"q, k, v", "q, k, v: input's gradient", "q, k, v: weight's gradient", width, 3 * width},
        Layer{"attention out", "attention out: input's gradient", "attention out: weight's gradient", width, width},
        Layer{"up", "up: input's gradient", "up: weight's gradient", width, 4 * width},
        Layer{"down", "down: input's gradient", "down: weight's gradient", 4 * width, width}}) {
    const auto [forward, backward, weight, in, out] = layer;
    bench.measure({forward, out, tokens, in, type, type, {false, out}, {false, in}, out});
    bench.measure({backward, in, tokens, out, type, type, {true, out}, {false, out}, in});
    bench.measure({weight, out, in, tokens, type, type, {false, out}, {true, in}, out});
  }
}

}  // namespace
}  // namespace spillway::gpt2

int main(int argc, char**) {
  int devices = 0;
  if (const cudaError_t why = cudaGetDeviceCount(&devices); why != cudaSuccess || devices == 0) {
    fmt::print("skipped: no GPU: {}\n", cudaGetErrorString(why));
    return 77;
  }
  try {
    if (argc > 1) {  // --tiny
      spillway::gpt2::bench_products(32, 16, 16);
    } else {
      spillway::gpt2::bench_products(8192, 8192, 1600);
    }
  } catch (const spillway::Error& error) {
    fmt::print(stderr, "cuda_product_bench: {}\n", error.what());
    return 1;
  }
}
