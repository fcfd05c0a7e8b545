#include "tools/models/ops/cuda/cuda_ops.h"

#include <fmt/format.h>

#include <nvtx3/nvtx3.hpp>

#include "spillway/error.h"
#include "tools/models/ops/cuda/check.h"
#include "tools/models/ops/ops_plugin.h"

namespace spillway::models {
namespace {

constexpr std::uint32_t kWidestHead = 256;  // attention.h

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
  if (shape.key_heads != 0 || shape.head_size != 0) {
    unsupported("it computes GPT-2 alone yet", "train this model on the host device");
  }
  SPILLWAY_CHECK(shape.tokens() > 0 && shape.heads > 0 && shape.width % shape.heads == 0, "a shape is whole heads");
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
  if (!layer_norm_fits(shape)) {
    unsupported(fmt::format("a width of {} is too much for layer norm", shape.width),
                "take a width that is a multiple of 8, or a narrower model");
  }
  if (shape.width / shape.heads > kWidestHead) {
    unsupported(fmt::format("heads of {} are too wide for attention", shape.width / shape.heads),
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
  const std::size_t widest = std::max<std::size_t>(shape.inner, 3 * std::size_t{shape.width});
  const std::size_t most =
      std::max({slice_tokens() * logits_stride() * sizeof(float), embedding_backward_scratch_bytes(shape),
                layer_norm_backward_scratch_bytes(shape), column_sums_scratch_bytes(shape.tokens(), widest),
                attention_backward_scratch_bytes(attention_shape()),
                rms_norm_backward_scratch_bytes(shape.tokens(), shape.width),
                rms_norm_backward_scratch_bytes(shape.tokens() * shape.heads, shape.head_width())});
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
  const std::uint64_t width = shape_.width, inner = shape_.inner;
  for (const auto& [in, out] : {std::pair{width, 3 * width}, {width, width}, {width, inner}, {inner, width}}) {
    layer_products_.try_emplace({in, out}, plan_layer(in, out));
  }
  head_whole_ = plan_head(slice_tokens());
  if (const std::size_t rest = shape_.tokens() % slice_tokens(); rest != 0) head_rest_ = plan_head(rest);
}

// Row-major tensors as the column-major matrices that they are: weight [in][out] is out × in, x [M][in] is in × M.
CudaOps::LayerProducts CudaOps::plan_layer(std::uint64_t in, std::uint64_t out) const {
  const std::uint64_t m = shape_.tokens();
  const DType type = shape_.type;
  Product forward{"a layer's product", out, m, in, type, type, {false, out}, {false, in}, out, Epilogue::kBias};
  Product backward{"a product back to a layer's input", in, m, out, type, type, {true, out}, {false, out}, in};
  Product weight{"a product for a weight's gradient", out, in, m, type, type, {false, out}, {true, in}, out};
  LayerProducts planned{
      .forward = gemm_->plan(forward), .backward_input = gemm_->plan(backward), .weight_gradient = gemm_->plan(weight)};
  if (type == DType::kFloat32) return planned;  // its gelu is exact to the last places
  weight.result = DType::kFloat32;
  planned.weight_gradient_sum = gemm_->plan(weight);
  if (fuses_gelu_) {
    // cuBLASLt wants columns of gelu's argument at multiples of 8 elements.
    forward.epilogue = Epilogue::kGelu;
    if (out % 8 == 0) planned.forward_gelu = gemm_->find(forward);
    backward.epilogue = Epilogue::kGeluBackward;
    if (in % 8 == 0) planned.backward_input_gelu = gemm_->find(backward);
  }
  if (fuses_bias_gradient_) {
    weight.epilogue = Epilogue::kBiasGradient;
    weight.result = type;
    planned.weight_gradient_bias = gemm_->find(weight);
  }
  return planned;
}

// The few words behind the last whole unit come first: what the many give is added to it, and not the other way round.
CudaOps::HeadProducts CudaOps::plan_head(std::uint64_t tokens) const {
  const std::uint64_t words = shape_.vocabulary, many = words - words % kLogitsUnit;
  if (shape_.type == DType::kFloat32 || words % 8 == 0 || many == 0) return {plan_head_part(tokens, 0, words)};
  return {plan_head_part(tokens, many, words - many), plan_head_part(tokens, 0, many)};
}

// token_weight [words][C] is C × words, x [M][C] is C × M, logits are words × M.
CudaOps::HeadPart CudaOps::plan_head_part(std::uint64_t tokens, std::uint64_t first, std::uint64_t words) const {
  const std::uint64_t width = shape_.width, stride = logits_stride();
  const std::uint64_t gradients = stride * sizeof(float) / element_bytes();
  const DType type = shape_.type, sum = DType::kFloat32;
  const Product logits{"the product for logits", words, tokens, width, type, sum, {true, width},
                       {false, width},           stride};
  const Product dx{
      "the product back from logits", width, tokens, words, type, type, {false, width}, {false, gradients}, width};
  const Product dweight{"the product for the embedding's gradient",
                        width,
                        words,
                        tokens,
                        type,
                        sum,
                        {false, width},
                        {true, gradients},
                        width};
  return {.first = first, .logits = gemm_->plan(logits), .dx = gemm_->plan(dx), .dweight = gemm_->plan(dweight)};
}

const CudaOps::LayerProducts& CudaOps::products(std::uint32_t in, std::uint32_t out) const {
  const auto found = layer_products_.find({in, out});
  SPILLWAY_CHECK(found != layer_products_.end(), "products are those of the shape's layers");
  return found->second;
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

void CudaOps::run(const Embedding& op, Stream& stream) {
  const Range range("embedding");
  if (op.position_weight == nullptr) refuse("embeddings without positions");
  require_in_hbm(op.tokens, shape_.tokens() * sizeof(std::uint32_t));
  require_tensor(op.token_weight, std::size_t{shape_.vocabulary} * shape_.width);
  require_tensor(op.position_weight, std::size_t{shape_.positions} * shape_.width);
  require_tensor(op.out, shape_.tokens() * shape_.width);
  check(embedding(shape_, op, native(stream)), "the embedding");
}

void CudaOps::run(const EmbeddingBackward& op, Stream& stream) {
  const Range range("embedding backward");
  if (op.dposition_weight == nullptr) refuse("embeddings without positions");
  require_in_hbm(op.tokens, shape_.tokens() * sizeof(std::uint32_t));
  require_tensor(op.dout, shape_.tokens() * shape_.width);
  require_tensor(op.dtoken_weight, std::size_t{shape_.vocabulary} * shape_.width, DType::kFloat32);
  require_tensor(op.dposition_weight, std::size_t{shape_.positions} * shape_.width, DType::kFloat32);
  check(embedding_backward(shape_, op, shared_, native(stream)), "the embedding's gradient");
}

void CudaOps::run(const LayerNorm& op, Stream& stream) {
  const Range range("layer norm");
  const std::size_t elements = shape_.tokens() * shape_.width;
  require_tensor(op.x, elements);
  require_tensor(op.out, elements);
  require_tensor(op.weight, shape_.width);
  require_tensor(op.bias, shape_.width);
  require_tensor(op.statistics, 2 * shape_.tokens(), DType::kFloat32);
  check(layer_norm(shape_, op, native(stream)), "a layer norm");
}

void CudaOps::run(const LayerNormBackward& op, Stream& stream) {
  const Range range("layer norm backward");
  const std::size_t elements = shape_.tokens() * shape_.width;
  require_tensor(op.x, elements);
  require_tensor(op.dout, elements);
  require_tensor(op.dx, elements);
  if (op.residual != nullptr) require_tensor(op.residual, elements);
  require_tensor(op.weight, shape_.width);
  require_tensor(op.statistics, 2 * shape_.tokens(), DType::kFloat32);
  require_tensor(op.dweight, shape_.width, op.gradient);
  require_tensor(op.dbias, shape_.width, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  check(layer_norm_backward(shape_, op, shared_, native(stream)), "a layer norm's gradient");
}

void CudaOps::run(const Linear& op, Stream& stream) {
  const Range range("linear");
  const std::size_t m = shape_.tokens(), in = op.in, out = op.out;
  require_tensor(op.x, m * in);
  require_tensor(op.weight, in * out);
  require_tensor(op.bias, out);
  require_tensor(op.y, m * out);
  if (op.residual != nullptr) require_tensor(op.residual, m * out);
  gemm_->run(products(op.in, op.out).forward,
             {.a = op.weight,
              .b = op.x,
              .d = op.y,
              .c = op.residual,
              .beta = op.residual != nullptr ? 1.0f : 0.0f,
              .bias = op.bias},
             native(stream));
}

void CudaOps::run(const LinearGelu& op, Stream& stream) {
  const Range range("linear, gelu");
  const std::size_t m = shape_.tokens(), in = op.in, out = op.out;
  require_tensor(op.after, m * out);
  const auto& fused = products(op.in, op.out).forward_gelu;
  if (!fused) {
    run(Linear{op.in, op.out, op.x, op.weight, op.bias, nullptr, op.before}, stream);
    check(gelu(shape_.type, op.before, op.after, m * out, native(stream)), "gelu");
    return;
  }
  require_tensor(op.x, m * in);
  require_tensor(op.weight, in * out);
  require_tensor(op.bias, out);
  require_tensor(op.before, m * out);
  gemm_->run(*fused, {.a = op.weight, .b = op.x, .d = op.after, .bias = op.bias, .aux = op.before}, native(stream));
}

void CudaOps::run(const LinearBackwardInput& op, Stream& stream) {
  const Range range("linear backward, input");
  const std::size_t m = shape_.tokens(), in = op.in, out = op.out;
  require_tensor(op.dy, m * out);
  require_tensor(op.weight, in * out);
  require_tensor(op.dx, m * in);
  if (op.gelu_before != nullptr) require_tensor(op.gelu_before, m * in);
  const LayerProducts& planned = products(op.in, op.out);
  const bool fused = op.gelu_before != nullptr && planned.backward_input_gelu;
  gemm_->run(fused ? *planned.backward_input_gelu : planned.backward_input,
             {.a = op.weight, .b = op.dy, .d = op.dx, .aux = op.gelu_before}, native(stream));
  if (op.gelu_before == nullptr || fused) return;
  check(gelu_backward(shape_.type, op.gelu_before, op.dx, m * in, native(stream)), "gelu's gradient");
}

void CudaOps::run(const LinearBackwardWeight& op, Stream& stream) {
  const Range range("linear backward, weight");
  const std::size_t m = shape_.tokens(), in = op.in, out = op.out;
  require_tensor(op.x, m * in);
  require_tensor(op.dy, m * out);
  require_tensor(op.dweight, in * out, op.gradient);
  require_tensor(op.dbias, out, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  SPILLWAY_CHECK(op.gradient == shape_.type || op.gradient == DType::kFloat32, "gradients are fp32 or as the tensors");
  const LayerProducts& planned = products(op.in, op.out);
  ProductMemory memory{.a = op.dy, .b = op.x, .d = op.dweight, .beta = op.accumulate ? 1.0f : 0.0f};
  if (op.gradient == shape_.type && planned.weight_gradient_bias) {
    memory.bias = op.dbias;
    gemm_->run(*planned.weight_gradient_bias, memory, native(stream));
    return;
  }
  gemm_->run(op.gradient == shape_.type ? planned.weight_gradient : *planned.weight_gradient_sum, memory,
             native(stream));
  const ColumnSums sums{shape_.type, op.dy, m, out, {op.dbias, op.gradient, op.accumulate}};
  check(column_sums(sums, shared_, native(stream)), "a bias gradient");
}

void CudaOps::run(const Attention& op, Stream& stream) {
  const Range range("attention");
  const std::size_t elements = shape_.tokens() * shape_.width;
  require_tensor(op.qkv, 3 * elements);
  require_tensor(op.out, elements);
  require_tensor(op.log_sums, attention_log_sums(), DType::kFloat32);
  check(attention_forward(attention_shape(), op.qkv, op.out, op.log_sums, native(stream)), "attention");
}

void CudaOps::run(const AttentionBackward& op, Stream& stream) {
  const Range range("attention backward");
  const std::size_t elements = shape_.tokens() * shape_.width;
  require_tensor(op.qkv, 3 * elements);
  require_tensor(op.out, elements);
  require_tensor(op.log_sums, attention_log_sums(), DType::kFloat32);
  require_tensor(op.dout, elements);
  require_tensor(op.dqkv, 3 * elements);
  check(attention_backward(attention_shape(), op.qkv, op.out, op.log_sums, op.dout, op.dqkv, shared_, native(stream)),
        "attention's gradient");
}

void CudaOps::run(const HeadLoss& op, Stream& stream) {
  const Range range("head and loss");
  const std::size_t m = shape_.tokens(), width = shape_.width;
  require_tensor(op.x, m * width);
  require_tensor(op.dx, m * width);
  require_in_hbm(op.targets, m * sizeof(std::uint32_t));
  require_in_hbm(op.losses, m * sizeof(float));
  require_tensor(op.token_weight, shape_.vocabulary * width);
  require_tensor(op.dtoken_weight, shape_.vocabulary * width, DType::kFloat32);
  for (std::size_t first = 0; first < m; first += kSlice) {
    head_slice(op, first, std::min(kSlice, m - first), native(stream));
  }
}

// dx comes last, for it may lie over x.
void CudaOps::head_slice(const HeadLoss& op, std::size_t first, std::size_t tokens, cudaStream_t stream) const {
  const HeadProducts& parts = tokens == slice_tokens() ? head_whole_ : head_rest_;
  const std::size_t offset = first * shape_.width * element_bytes();
  const auto* x = static_cast<const std::byte*>(op.x) + offset;
  auto* dx = static_cast<std::byte*>(op.dx) + offset;
  auto* logits = reinterpret_cast<float*>(shared_);
  const auto weight = [&](const HeadPart& part) {
    return static_cast<const std::byte*>(op.token_weight) + part.first * shape_.width * element_bytes();
  };
  const auto gradients = [&](const HeadPart& part) { return shared_ + part.first * element_bytes(); };
  for (const HeadPart& part : parts) {
    gemm_->run(part.logits, {.a = weight(part), .b = x, .d = logits + part.first}, stream);
  }
  check(head_gradients({shape_.type, tokens, shape_.vocabulary, logits_stride(), logits, op.targets + first,
                        op.losses + first, op.scale},
                       stream),
        "the loss");
  for (const HeadPart& part : parts) {
    float* dweight = op.dtoken_weight + part.first * shape_.width;
    gemm_->run(part.dweight,
               {.a = x, .b = gradients(part), .d = dweight, .beta = op.accumulate || first > 0 ? 1.0f : 0.0f}, stream);
  }
  for (const HeadPart& part : parts) {
    const float beta = &part == parts.data() ? 0.0f : 1.0f;
    gemm_->run(part.dx, {.a = weight(part), .b = gradients(part), .d = dx, .beta = beta}, stream);
  }
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
