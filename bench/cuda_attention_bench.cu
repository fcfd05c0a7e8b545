// How long the trainer's attention takes on this GPU: gpt2-xl's heads (25 of 64 columns), forward and backward, one
// JSON line each. Events on the stream, the median of 20 runs after 3.
//
//   cuda_attention_bench [--tiny]
//
// Operations are counted as in the FlashAttention papers: 4 T^2 per column of a head and row of the batch forward, half
// of that for being causal; 2.5 times as many backward, whatever is computed again.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "bench/cuda_timing.h"
#include "tools/models/ops/cuda/attention.h"

namespace {

using spillway::DType;
using spillway::bench::check;
using spillway::bench::median_us;
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

void report(const AttentionShape& shape, const char* operation, double us, double operations) {
  std::printf(
      "{\"operation\": \"%s\", \"type\": \"%s\", \"batch\": %u, \"heads\": %u, \"head_width\": %u, \"sequence\": %u, "
      "\"us\": %.1f, \"tflops\": %.1f}\n",
      operation, name_of(shape.type).data(), shape.batch, shape.heads, shape.width / shape.heads, shape.sequence, us,
      operations / us * 1e-6);
  std::fflush(stdout);
}

void measure(const AttentionShape& shape, cudaStream_t stream) {
  const std::size_t tokens = std::size_t{shape.batch} * shape.sequence, count = tokens * shape.width;
  void *qkv = filled(shape.type, 3 * count, 1), *dout = filled(shape.type, count, 2);
  void *out = filled(shape.type, count, 3), *dqkv = filled(shape.type, 3 * count, 4);
  void *log_sums = filled(DType::kFloat32, tokens * shape.heads, 5), *scratch = nullptr;
  check(cudaMalloc(&scratch, attention_backward_scratch_bytes(shape)), "cudaMalloc");
  check(cudaDeviceSynchronize(), "fill");
  auto* sums = static_cast<float*>(log_sums);
  const double forward_operations = 2.0 * tokens * shape.width * shape.sequence;
  report(shape, "forward", median_us(stream, [&] { return attention_forward(shape, qkv, out, sums, stream); }),
         forward_operations);
  const auto backward = [&] { return attention_backward(shape, qkv, out, sums, dout, dqkv, scratch, stream); };
  report(shape, "backward", median_us(stream, backward), 2.5 * forward_operations);
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
  if (argc > 1) {  // --tiny
    measure({.type = DType::kBFloat16, .batch = 1, .sequence = 100, .width = 128, .heads = 2}, stream);
    return 0;
  }
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    measure({.type = type, .batch = 8, .sequence = 1024, .width = 1600, .heads = 25}, stream);
    measure({.type = type, .batch = 2, .sequence = 4096, .width = 1600, .heads = 25}, stream);
  }
  // Wider heads, and the fp32 path.
  measure({.type = DType::kBFloat16, .batch = 8, .sequence = 1024, .width = 1536, .heads = 16}, stream);
  measure({.type = DType::kBFloat16, .batch = 8, .sequence = 1024, .width = 2048, .heads = 16}, stream);
  measure({.type = DType::kFloat32, .batch = 8, .sequence = 1024, .width = 1600, .heads = 25}, stream);
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}
