#include "tools/models/ops/cuda/cuda_ops.h"

#include <fmt/format.h>

#include <nvtx3/nvtx3.hpp>

#include "spillway/error.h"
#include "tools/models/ops/cuda/check.h"
#include "tools/models/ops/ops_plugin.h"

namespace spillway::models {
namespace {

using Range = nvtx3::scoped_range;  // what a profiler shows of the enqueueing thread

[[noreturn]] void unsupported(std::string happened, std::string hint) {
  throw Error(Code::kUnsupported,
              {.object = "device cuda", .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

bool within(const void* data, std::size_t bytes, std::span<const std::byte> memory) {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= memory.data() && begin + bytes <= memory.data() + memory.size();
}

}  // namespace

CudaOps::CudaOps(const Shape& shape, Fusion fusion) : shape_(shape) {
  SPILLWAY_CHECK(shape.tokens() > 0 && shape.heads > 0 && (shape.head_size != 0 || shape.width % shape.heads == 0) &&
                     shape.heads % shape.kv_heads() == 0,
                 "a shape is whole heads, in whole groups");
  int device = 0;
  cudaDeviceProp properties{};
  cudaError_t result = cudaGetDevice(&device);
  if (result == cudaSuccess) result = cudaGetDeviceProperties(&properties, device);
  if (result != cudaSuccess) {
    unsupported(std::string("no GPU can be used: ") + cudaGetErrorString(result), "`spillway doctor` looks closer");
  }
  if (properties.major < 8) {
    unsupported(fmt::format("{} has compute capability {}.{}", properties.name, properties.major, properties.minor),
                "take a GPU of compute capability 8.0 or more, or the host device");
  }
  if (!decoder() && !layer_norm_fits(shape)) {
    unsupported(fmt::format("a width of {} is too much for layer norm", shape.width),
                "take a width that is a multiple of 8, or a narrower model");
  }
  if (shape.head_width() > kWidestHead) {
    unsupported(fmt::format("heads of {} are too wide for attention", shape.head_width()),
                fmt::format("take a model whose heads are at most {} wide", kWidestHead));
  }
  gpu_ = properties.name;
  // By default gelu, where cuBLASLt's kernels with it were seen to cost less than the two one after the other
  // (github.com/karpathy/llm.c/pull/591 and 653, sgl-project/sglang/pull/34350), and bias gradients nowhere: a kernel
  // of their own is 1.6 % of a step of gpt2-xl (it reads 0.24 GB a layer), while a product that cuBLASLt computes with
  // an older kernel for their sake is one of three, and took 1.6 times as long where that was seen
  // (NVIDIA/CUDALibrarySamples/issues/90).
  const bool hopper_or_blackwell = properties.major == 9 || properties.major == 10;
  fuses_gelu_ = fusion == Fusion::kAuto ? hopper_or_blackwell : fusion != Fusion::kNone;
  fuses_bias_gradient_ = fusion == Fusion::kAll;
  const std::size_t tokens = shape.slice_tokens();
  const std::size_t widest = std::max<std::size_t>({2 * std::size_t{shape.inner}, shape.qkv_width(), shape.width});
  const std::size_t most =
      std::max({head_tokens() * logits_stride() * sizeof(float), embedding_backward_scratch_bytes(shape),
                decoder() ? 0 : layer_norm_backward_scratch_bytes(shape), column_sums_scratch_bytes(tokens, widest),
                tokens * shape.heads * sizeof(float), rms_norm_backward_scratch_bytes(tokens, shape.width),
                rms_norm_backward_scratch_bytes(tokens * shape.heads, shape.head_width())});
  shared_bytes_ = align_up<std::size_t>(most, 4096);
}

CudaOps::~CudaOps() {
  for (const auto& memory : registered_) cudaHostUnregister(memory.data());
}

std::vector<std::string> CudaOps::describe() const {
  const std::size_t version = cublasLtGetVersion();
  const char* inside = shape_.type == DType::kFloat32 ? "biases"
                       : fuses_bias_gradient_         ? "biases, gelu and bias gradients"
                       : fuses_gelu_                  ? "biases and gelu"
                                                      : "biases";
  return {fmt::format("{} products on {} by cuBLASLt {}.{}.{}, {} inside; attention never keeps its scores",
                      name_of(shape_.type), gpu_, version / 10000, version / 100 % 100, version % 100, inside)};
}

void CudaOps::bind(const Engine& engine, std::span<std::byte> scratch) {
  SPILLWAY_CHECK(engine_ == nullptr, "operations are bound once");
  SPILLWAY_CHECK(scratch.size() >= scratch_bytes(), "scratch is what scratch_bytes() asked for");
  engine_ = &engine;
  require_in_hbm(scratch.data(), scratch.size());
  gemm_.emplace(scratch.first(Gemm::kWorkspaceBytes));
  shared_ = scratch.data() + Gemm::kWorkspaceBytes;
  for (const std::size_t tokens : {shape_.slice_tokens(), shape_.last_slice()}) {
    if (tokens == 0) continue;
    plan_layers(tokens);
    for (const std::size_t slice : {std::min(kSlice, tokens), tokens > kSlice ? tokens % kSlice : 0}) {
      if (slice != 0) plan_head(slice);
    }
  }
}

std::size_t CudaOps::tokens(std::uint32_t count) const {
  const std::size_t tokens = tokens_of(shape_, count);
  SPILLWAY_CHECK(tokens <= shape_.slice_tokens(), "an operation has no more tokens than a slice");
  return tokens;
}

void CudaOps::require_in_hbm(const void* data, std::size_t bytes) const {
  SPILLWAY_CHECK(engine_ != nullptr, "operations must be bound to an engine first");
  SPILLWAY_CHECK(engine_->in_hbm(data, bytes), "operations work inside the HBM arena only");
}

void CudaOps::require_tensor(const void* data, std::size_t elements) const {
  require_tensor(data, elements, shape_.type);
}

void CudaOps::require_tensor(const void* data, std::size_t elements, DType type) const {
  require_in_hbm(data, elements * size_of(type));
  SPILLWAY_CHECK(reinterpret_cast<std::uintptr_t>(data) % 16 == 0, "tensors are aligned to 16 bytes");
}

void CudaOps::require_registered(const void* host, std::size_t bytes) const {
  const bool registered = std::any_of(registered_.begin(), registered_.end(),
                                      [&](std::span<std::byte> memory) { return within(host, bytes, memory); });
  SPILLWAY_CHECK(registered, "what goes up and down lies in registered memory");
}

cudaStream_t CudaOps::native(Stream& stream) const {
  SPILLWAY_CHECK(stream.kind() == DeviceKind::kCuda, "operations of the cuda device go to its streams");
  return static_cast<cudaStream_t>(stream.native());
}

void CudaOps::register_host(std::span<std::byte> memory) {
  check(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault), "registering host memory");
  registered_.push_back(memory);
}

void CudaOps::upload(const void* host, void* device, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  require_registered(host, bytes);
  check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, native(stream)), "a copy to the GPU");
}

void CudaOps::download(const void* device, void* host, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  require_registered(host, bytes);
  check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, native(stream)), "a copy from the GPU");
}

void CudaOps::zero(void* device, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  check(cudaMemsetAsync(device, 0, bytes, native(stream)), "filling with zeros");
}

AttentionShape CudaOps::attention_shape(std::size_t tokens, const AttentionPart& part) const {
  const auto m = static_cast<std::uint32_t>(tokens);
  return {.type = shape_.type,
          .batch = part.count != 0 ? 1 : m / shape_.sequence,
          .sequence = part.count != 0 ? m : shape_.sequence,
          .heads = shape_.heads,
          .key_heads = shape_.kv_heads(),
          .head_width = shape_.head_width()};
}

void CudaOps::require_attention(std::size_t tokens, const AttentionRules& rules, const AttentionPart& part) const {
  SPILLWAY_CHECK(part.count == 0 ? tokens % shape_.sequence == 0 : tokens == part.count,
                 "attention is of whole rows, or of a part of one");
  if (rules.starts != nullptr) require_in_hbm(rules.starts, tokens * sizeof(std::uint32_t));
  if (part.count == 0) return;
  const std::size_t keys = std::size_t{part.first} + part.count;
  for (const void* side : {part.keys, part.values}) {
    require_rows(side, keys, part.stride, std::size_t{shape_.kv_heads()} * shape_.head_width());
  }
}

void CudaOps::run(const Attention& op, Stream& stream) {
  const Range range("attention");
  const std::size_t m = op.part.count != 0 ? tokens(op.part.count) : tokens(op.count);
  require_attention(m, op.rules, op.part);
  require_tensor(op.qkv, m * shape_.qkv_width());
  require_tensor(op.out, m * shape_.query_width());
  require_tensor(op.log_sums, m * shape_.heads, DType::kFloat32);
  check(attention_forward(attention_shape(m, op.part), op, native(stream)), "attention");
}

void CudaOps::run(const AttentionBackward& op, Stream& stream) {
  const Range range("attention backward");
  const std::size_t m = op.part.count != 0 ? tokens(op.part.count) : tokens(op.count);
  require_attention(m, op.rules, op.part);
  require_tensor(op.qkv, m * shape_.qkv_width());
  require_tensor(op.out, m * shape_.query_width());
  require_tensor(op.log_sums, m * shape_.heads, DType::kFloat32);
  require_tensor(op.dout, m * shape_.query_width());
  require_tensor(op.dqkv, m * shape_.qkv_width());
  if (op.part.count != 0) {
    const std::size_t keys = std::size_t{op.part.first} + op.part.count;
    require_tensor(op.dkv, keys * 2 * shape_.kv_heads() * shape_.head_width(), DType::kFloat32);
  }
  check(attention_backward(attention_shape(m, op.part), op, shared_, native(stream)), "attention's gradient");
}

}  // namespace spillway::models

// The plugin's one exported function.
extern "C" __attribute__((visibility("default"))) const spillway::models::OpsPlugin* spillway_models_cuda_ops() {
  using namespace spillway::models;
  static constexpr OpsPlugin plugin{.interface = kOpsInterface,
                                    .create = [](const Shape& shape, Fusion fusion) -> std::unique_ptr<Ops> {
                                      return std::make_unique<CudaOps>(shape, fusion);
                                    }};
  return &plugin;
}
