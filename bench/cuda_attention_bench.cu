// How long the trainer's attention takes on this GPU: gpt2-xl's heads (25 of 64 columns), and those of decoders that
// share keys and values, forward and backward, one JSON line each. Events on the stream, the median of 20 runs after 3.
//
//   cuda_attention_bench [--tiny]
//
// Operations are counted as in the FlashAttention papers: 4 T^2 per column of a head and row of the batch forward, half
// of that for being causal, less what lies outside a window; 2.5 times as many backward, whatever is computed again.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "bench/cuda_timing.h"
#include "tools/models/ops/cuda/attention.h"

namespace {

using spillway::DType;
using spillway::bench::check;
using spillway::bench::median_us;
using spillway::models::Attention;
using spillway::models::AttentionBackward;
using spillway::models::AttentionRules;
using spillway::models::AttentionShape;

// Numbers spread evenly over (-1, 1), the same ones each time.
template <typename Element>
__global__ void fill(Element* data, std::size_t count, std::uint32_t seed) {
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u + seed;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    data[i] = static_cast<Element>(static_cast<float>(x >> 8) * 0x1p-23f - 1.0f);
  }
}

void* filled(DType type, std::size_t count, std::uint32_t seed) {
  void* data = nullptr;
  check(cudaMalloc(&data, count * size_of(type)), "cudaMalloc");
  switch (type) {
    case DType::kFloat32: fill<<<1024, 256>>>(static_cast<float*>(data), count, seed); break;
    case DType::kBFloat16: fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(data), count, seed); break;
    case DType::kFloat16: fill<<<1024, 256>>>(static_cast<__half*>(data), count, seed); break;
  }
  check(cudaGetLastError(), "fill");
  return data;
}

void report(const AttentionShape& shape, const AttentionRules& rules, const char* operation, double us,
            double operations) {
  std::printf(
      "{\"operation\": \"%s\", \"type\": \"%s\", \"batch\": %u, \"heads\": %u, \"key_heads\": %u, "
      "\"head_width\": %u, \"sequence\": %u, \"window\": %u, \"soft_cap\": %g, \"us\": %.1f, \"tflops\": %.1f}\n",
      operation, name_of(shape.type).data(), shape.batch, shape.heads, shape.key_heads, shape.head_width,
      shape.sequence, rules.window, rules.soft_cap, us, operations / us * 1e-6);
  std::fflush(stdout);
}

void measure(const AttentionShape& shape, cudaStream_t stream, const AttentionRules& rules = {}) {
  const auto tokens = static_cast<std::size_t>(shape.tokens());
  const std::size_t count = tokens * shape.query_width(), all = tokens * shape.qkv_width();
  void *qkv = filled(shape.type, all, 1), *dout = filled(shape.type, count, 2);
  void *out = filled(shape.type, count, 3), *dqkv = filled(shape.type, all, 4);
  void *log_sums = filled(DType::kFloat32, tokens * shape.heads, 5), *scratch = nullptr;
  check(cudaMalloc(&scratch, attention_backward_scratch_bytes(shape)), "cudaMalloc");
  check(cudaDeviceSynchronize(), "fill");
  auto* sums = static_cast<float*>(log_sums);
  const double sequence = shape.sequence,
               window = rules.window == 0 ? sequence : std::min<double>(rules.window, sequence);
  const double forward_operations = 4.0 * static_cast<double>(count) * (window - window * window / (2 * sequence));
  const Attention forward{qkv, out, sums, rules};
  const AttentionBackward backward{qkv, out, sums, dout, dqkv, rules};
  report(shape, rules, "forward", median_us(stream, [&] { return attention_forward(shape, forward, stream); }),
         forward_operations);
  report(shape, rules, "backward",
         median_us(stream, [&] { return attention_backward(shape, backward, scratch, stream); }),
         2.5 * forward_operations);
  for (void* memory : {qkv, dout, out, dqkv, log_sums, scratch}) check(cudaFree(memory), "cudaFree");
}

}  // namespace

int main(int argc, char**) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what has been measured stays when it is ended
  int devices = 0;
  if (const cudaError_t why = cudaGetDeviceCount(&devices); why != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU: %s\n", cudaGetErrorString(why));
    return 77;
  }
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const auto shape = [](DType type, std::uint32_t batch, std::uint32_t sequence, std::uint32_t heads,
                        std::uint32_t key_heads, std::uint32_t head_width) {
    return AttentionShape{type, batch, sequence, heads, key_heads, head_width};
  };
  if (argc > 1) {  // --tiny
    measure(shape(DType::kBFloat16, 1, 100, 2, 2, 64), stream);
    measure(shape(DType::kBFloat16, 1, 100, 4, 2, 64), stream, {.window = 40, .soft_cap = 50});
    return 0;
  }
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    measure(shape(type, 8, 1024, 25, 25, 64), stream);
    measure(shape(type, 2, 4096, 25, 25, 64), stream);
  }
  // Wider heads, and the fp32 path.
  measure(shape(DType::kBFloat16, 8, 1024, 16, 16, 96), stream);
  measure(shape(DType::kBFloat16, 8, 1024, 16, 16, 128), stream);
  measure(shape(DType::kFloat32, 8, 1024, 25, 25, 64), stream);
  // Llama-3.2-1B, Qwen3-8B, Mistral-7B with its window, Gemma-2-2B and Gemma-3-1B.
  measure(shape(DType::kBFloat16, 2, 4096, 32, 8, 64), stream);
  measure(shape(DType::kBFloat16, 2, 4096, 32, 8, 128), stream);
  measure(shape(DType::kBFloat16, 1, 8192, 32, 8, 128), stream, {.window = 4096});
  measure(shape(DType::kBFloat16, 1, 8192, 8, 4, 256), stream, {.window = 4096, .soft_cap = 50});
  measure(shape(DType::kBFloat16, 1, 8192, 4, 1, 256), stream, {.window = 512});
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}
