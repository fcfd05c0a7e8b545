// The products of layers and of the head. Row-major tensors are the column-major matrices that they are (gemm.h).
#include <bit>

#include <nvtx3/nvtx3.hpp>

#include "tools/models/ops/cuda/check.h"
#include "tools/models/ops/cuda/cuda_ops.h"

namespace spillway::models {
namespace {

using Range = nvtx3::scoped_range;

// Tensors are aligned to 16 bytes; what begins inside a row is to the power of 2 that its columns say.
std::uint32_t alignment_of(const void* address) {
  return std::uint32_t{1} << std::min(std::countr_zero(reinterpret_cast<std::uintptr_t>(address)), 4);
}

std::uint64_t stride_of(std::size_t given, std::uint32_t columns) { return given != 0 ? given : columns; }

}  // namespace

const PlannedProduct* CudaOps::found(const Product& product) {
  auto at = planned_.find(product);
  if (at == planned_.end()) at = planned_.emplace(product, gemm_->find(product)).first;
  return at->second ? &*at->second : nullptr;
}

const PlannedProduct& CudaOps::planned(const Product& product) {
  const PlannedProduct* const there = found(product);
  return there != nullptr ? *there : *(planned_[product] = gemm_->plan(product));  // which says why there is none
}

// x [M][in] is in × M; the weight [in][out] is out × in, [out][in] is in × out.
Product CudaOps::forward_product(const LayerProduct& layer, Epilogue epilogue) const {
  const auto [m, in, out, layout, stride, row] = layer;
  const Product::Operand weight = layout == Layout::kInOut ? Product::Operand{false, out} : Product::Operand{true, in};
  return {.name = "a layer's product",
          .rows = out,
          .columns = m,
          .depth = in,
          .operands = shape_.type,
          .result = shape_.type,
          .a = weight,
          .b = {false, in},
          .stride = stride,
          .epilogue = epilogue,
          .alignment = alignment_of(row)};
}

Product CudaOps::backward_product(const LayerProduct& layer, Epilogue epilogue) const {
  const auto [m, in, out, layout, stride, row] = layer;
  const Product::Operand weight = layout == Layout::kInOut ? Product::Operand{true, out} : Product::Operand{false, in};
  return {.name = "a product back to a layer's input",
          .rows = in,
          .columns = m,
          .depth = out,
          .operands = shape_.type,
          .result = shape_.type,
          .a = weight,
          .b = {false, stride, alignment_of(row)},
          .stride = in,
          .epilogue = epilogue};
}

// dweight [in][out] = xᵀ · dy is out × in, [out][in] = dyᵀ · x is in × out.
Product CudaOps::weight_product(const LayerProduct& layer, DType gradient, Epilogue epilogue) const {
  const auto [m, in, out, layout, stride, row] = layer;
  const Product::Operand x{layout == Layout::kInOut, in}, dy{layout == Layout::kOutIn, stride, alignment_of(row)};
  return {.name = "a product for a weight's gradient",
          .rows = layout == Layout::kInOut ? out : in,
          .columns = layout == Layout::kInOut ? in : out,
          .depth = m,
          .operands = shape_.type,
          .result = gradient,
          .a = layout == Layout::kInOut ? dy : x,
          .b = layout == Layout::kInOut ? x : dy,
          .stride = layout == Layout::kInOut ? out : in,
          .epilogue = epilogue};
}

// cuBLASLt wants columns of gelu's argument at multiples of 8 elements.
const PlannedProduct* CudaOps::with_gelu(const LayerProduct& layer) {
  const bool inside = fuses_gelu_ && shape_.type != DType::kFloat32 && layer.out % 8 == 0;
  return inside ? found(forward_product(layer, Epilogue::kGelu)) : nullptr;
}

const PlannedProduct* CudaOps::with_gelu_backward(const LayerProduct& layer) {
  const bool inside = fuses_gelu_ && shape_.type != DType::kFloat32 && layer.in % 8 == 0;
  return inside ? found(backward_product(layer, Epilogue::kGeluBackward)) : nullptr;
}

// Of the operand dy where that is the left one.
const PlannedProduct* CudaOps::with_bias_gradient(const LayerProduct& layer, DType gradient) {
  const bool inside = fuses_bias_gradient_ && shape_.type != DType::kFloat32 && gradient == shape_.type &&
                      layer.layout == Layout::kInOut;
  return inside ? found(weight_product(layer, gradient, Epilogue::kBiasGradient)) : nullptr;
}

void CudaOps::plan_layers(std::size_t tokens) {
  const std::uint64_t m = tokens, width = shape_.width, inner = shape_.inner, qkv = shape_.qkv_width();
  const std::uint64_t query = shape_.query_width(), key = (qkv - query) / 2;
  const Layout layout = decoder() ? Layout::kOutIn : Layout::kInOut;
  std::vector<LayerProduct> layers = {{m, width, qkv, layout, qkv, nullptr},
                                      {m, query, width, layout, width, nullptr},
                                      {m, inner, width, layout, width, nullptr}};
  if (decoder()) {
    layers.insert(layers.end(), {{m, width, query, layout, qkv, nullptr},
                                 {m, width, key, layout, qkv, nullptr},
                                 {m, width, inner, layout, 2 * inner, nullptr},
                                 {m, width, 2 * inner, layout, 2 * inner, nullptr}});
  } else {
    layers.push_back({m, width, inner, layout, inner, nullptr});
  }
  const std::uint64_t rank = shape_.adapter_rank;
  for (const LayerProduct& layer : layers) {
    plan_layer(layer, decoder() ? Epilogue::kNone : Epilogue::kBias, rank == 0);
    with_gelu(layer);
    if (!shape_.forward_alone) with_gelu_backward(layer);
    if (!shape_.forward_alone && rank == 0) with_bias_gradient(layer, shape_.type);
    if (rank == 0) continue;
    plan_layer({m, layer.in, rank, Layout::kOutIn, rank, nullptr}, Epilogue::kNone, true);
    plan_layer({m, rank, layer.out, Layout::kOutIn, layer.stride, nullptr}, Epilogue::kNone, true);
  }
}

void CudaOps::plan_layer(const LayerProduct& layer, Epilogue epilogue, bool trained) {
  planned(forward_product(layer, epilogue));
  if (shape_.forward_alone) return;
  planned(backward_product(layer, Epilogue::kNone));
  if (!trained) return;
  planned(weight_product(layer, shape_.type, Epilogue::kNone));
  planned(weight_product(layer, DType::kFloat32, Epilogue::kNone));
}

void CudaOps::run(const Linear& op, Stream& stream) {
  const Range range("linear");
  const std::size_t m = tokens(op.count), in = op.in, out = op.out, stride = stride_of(op.y_stride, op.out);
  require_tensor(op.x, m * in);
  require_tensor(op.weight, in * out);
  SPILLWAY_CHECK(op.bias != nullptr || op.layout == Layout::kOutIn, "GPT-2's products have biases");
  if (op.bias != nullptr) require_tensor(op.bias, out);
  require_rows(op.y, m, stride, out);
  if (op.residual != nullptr) require_rows(op.residual, m, stride, out);
  // Of the less aligned one: both are read and written alike.
  const void* row = op.residual != nullptr && alignment_of(op.residual) < alignment_of(op.y) ? op.residual : op.y;
  const LayerProduct layer{m, in, out, op.layout, stride, row};
  gemm_->run(planned(forward_product(layer, op.bias != nullptr ? Epilogue::kBias : Epilogue::kNone)),
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
  const std::size_t m = tokens(op.count), in = op.in, out = op.out;
  require_tensor(op.after, m * out);
  const PlannedProduct* const fused = with_gelu({m, in, out, Layout::kInOut, out, nullptr});
  if (fused == nullptr) {
    run(Linear{.in = op.in,
               .out = op.out,
               .x = op.x,
               .weight = op.weight,
               .bias = op.bias,
               .residual = nullptr,
               .y = op.before,
               .count = op.count},
        stream);
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
  const std::size_t m = tokens(op.count), in = op.in, out = op.out, stride = stride_of(op.dy_stride, op.out);
  require_rows(op.dy, m, stride, out);
  require_tensor(op.weight, in * out);
  require_tensor(op.dx, m * in);
  if (op.gelu_before != nullptr) require_tensor(op.gelu_before, m * in);
  if (op.residual != nullptr) require_tensor(op.residual, m * in);
  SPILLWAY_CHECK(op.gelu_before == nullptr || op.residual == nullptr, "gelu's gradient is of the product alone");
  const LayerProduct layer{m, in, out, op.layout, stride, op.dy};
  const PlannedProduct* const fused = op.gelu_before != nullptr ? with_gelu_backward(layer) : nullptr;
  gemm_->run(fused != nullptr ? *fused : planned(backward_product(layer, Epilogue::kNone)),
             {.a = op.weight,
              .b = op.dy,
              .d = op.dx,
              .c = op.residual,
              .beta = op.residual != nullptr ? 1.0f : 0.0f,
              .aux = op.gelu_before},
             native(stream));
  if (op.gelu_before == nullptr || fused != nullptr) return;
  check(gelu_backward(shape_.type, op.gelu_before, op.dx, m * in, native(stream)), "gelu's gradient");
}

void CudaOps::run(const LinearBackwardWeight& op, Stream& stream) {
  const Range range("linear backward, weight");
  const std::size_t m = tokens(op.count), in = op.in, out = op.out, stride = stride_of(op.dy_stride, op.out);
  require_tensor(op.x, m * in);
  require_rows(op.dy, m, stride, out);
  require_tensor(op.dweight, in * out, op.gradient);
  if (op.dbias != nullptr) require_tensor(op.dbias, out, op.gradient);
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  SPILLWAY_CHECK(op.gradient == shape_.type || op.gradient == DType::kFloat32, "gradients are fp32 or as the tensors");
  const LayerProduct layer{m, in, out, op.layout, stride, op.dy};
  const bool in_out = op.layout == Layout::kInOut;
  ProductMemory memory{
      .a = in_out ? op.dy : op.x, .b = in_out ? op.x : op.dy, .d = op.dweight, .beta = op.accumulate ? 1.0f : 0.0f};
  const PlannedProduct* const fused = op.dbias != nullptr ? with_bias_gradient(layer, op.gradient) : nullptr;
  if (fused != nullptr) {
    memory.bias = op.dbias;
    gemm_->run(*fused, memory, native(stream));
    return;
  }
  gemm_->run(planned(weight_product(layer, op.gradient, Epilogue::kNone)), memory, native(stream));
  if (op.dbias == nullptr) return;
  const ColumnSums sums{shape_.type, op.dy, m, out, stride, {op.dbias, op.gradient, op.accumulate}};
  SPILLWAY_CHECK(column_sums_scratch_bytes(m, out) <= shared_bytes_, "biases are of the shape's layers");
  check(column_sums(sums, shared_, native(stream)), "a bias gradient");
}

// The few words after the last whole unit come first: what the many give is added to it, and not the other way round.
std::vector<CudaOps::HeadPart> CudaOps::head_parts() const {
  const std::uint64_t words = shape_.vocabulary, many = words - words % kLogitsUnit;
  if (shape_.type == DType::kFloat32 || words % 8 == 0 || many == 0) return {{0, words}};
  return {{many, words - many}, {0, many}};
}

// token_weight [words][C] is C × words, x [M][C] is C × M, logits are words × M.
Product CudaOps::logits_product(const HeadPart& part, std::uint64_t tokens, std::uint64_t stride) const {
  const std::uint64_t width = shape_.width;
  return {.name = "the product for logits",
          .rows = part.words,
          .columns = tokens,
          .depth = width,
          .operands = shape_.type,
          .result = DType::kFloat32,
          .a = {true, width},
          .b = {false, width},
          .stride = stride};
}

Product CudaOps::head_input_product(const HeadPart& part, std::uint64_t tokens) const {
  const std::uint64_t width = shape_.width, gradients = logits_stride() * sizeof(float) / element_bytes();
  return {.name = "the product back from logits",
          .rows = width,
          .columns = tokens,
          .depth = part.words,
          .operands = shape_.type,
          .result = shape_.type,
          .a = {false, width},
          .b = {false, gradients},
          .stride = width};
}

Product CudaOps::head_weight_product(const HeadPart& part, std::uint64_t tokens) const {
  const std::uint64_t width = shape_.width, gradients = logits_stride() * sizeof(float) / element_bytes();
  return {.name = "the product for the embedding's gradient",
          .rows = width,
          .columns = part.words,
          .depth = tokens,
          .operands = shape_.type,
          .result = DType::kFloat32,
          .a = {false, width},
          .b = {true, gradients},
          .stride = width};
}

void CudaOps::plan_head(std::size_t tokens) {
  for (const HeadPart& part : head_parts()) {
    planned(logits_product(part, tokens, logits_stride()));
    if (shape_.forward_alone) continue;
    planned(head_input_product(part, tokens));
    if (shape_.adapter_rank == 0) planned(head_weight_product(part, tokens));
  }
}

void CudaOps::run(const HeadLoss& op, Stream& stream) {
  const Range range("head and loss");
  const std::size_t m = tokens(op.count), width = shape_.width;
  require_tensor(op.x, m * width);
  if (op.dx != nullptr) require_tensor(op.dx, m * width);
  require_in_hbm(op.targets, m * sizeof(std::uint32_t));
  require_in_hbm(op.losses, m * sizeof(float));
  require_tensor(op.token_weight, shape_.vocabulary * width);
  if (op.dtoken_weight != nullptr) require_tensor(op.dtoken_weight, shape_.vocabulary * width, DType::kFloat32);
  for (std::size_t first = 0; first < m; first += kSlice) {
    head_slice(op, first, std::min(kSlice, m - first), native(stream));
  }
}

// dx comes last, for it may lie over x.
void CudaOps::head_slice(const HeadLoss& op, std::size_t first, std::size_t tokens, cudaStream_t stream) {
  const std::vector<HeadPart> parts = head_parts();
  const std::size_t offset = first * shape_.width * element_bytes();
  const auto* x = static_cast<const std::byte*>(op.x) + offset;
  auto* logits = reinterpret_cast<float*>(shared_);
  const auto weight = [&](const HeadPart& part) {
    return static_cast<const std::byte*>(op.token_weight) + part.first * shape_.width * element_bytes();
  };
  const auto gradients = [&](const HeadPart& part) { return shared_ + part.first * element_bytes(); };
  for (const HeadPart& part : parts) {
    gemm_->run(planned(logits_product(part, tokens, logits_stride())),
               {.a = weight(part), .b = x, .d = logits + part.first}, stream);
  }
  check(head_gradients({shape_.type, tokens, shape_.vocabulary, logits_stride(), logits, op.targets + first,
                        op.losses + first, op.scale, op.soft_cap},
                       stream),
        "the loss");
  if (op.dx == nullptr) return;
  for (const HeadPart& part : parts) {
    if (op.dtoken_weight == nullptr) break;
    float* dweight = op.dtoken_weight + part.first * shape_.width;
    gemm_->run(planned(head_weight_product(part, tokens)),
               {.a = x, .b = gradients(part), .d = dweight, .beta = op.accumulate || first > 0 ? 1.0f : 0.0f}, stream);
  }
  auto* dx = static_cast<std::byte*>(op.dx) + offset;
  for (const HeadPart& part : parts) {
    const float beta = &part == parts.data() ? 0.0f : 1.0f;
    gemm_->run(planned(head_input_product(part, tokens)),
               {.a = weight(part), .b = gradients(part), .d = dx, .beta = beta}, stream);
  }
}

void CudaOps::run(const Logits& op, Stream& stream) {
  const Range range("logits");
  const std::size_t words = shape_.vocabulary, width = shape_.width;
  require_tensor(op.x, op.count * width);
  require_tensor(op.token_weight, words * width);
  require_tensor(op.logits, op.count * words, DType::kFloat32);
  for (const HeadPart& part : head_parts()) {
    const auto* weight = static_cast<const std::byte*>(op.token_weight) + part.first * width * element_bytes();
    gemm_->run(planned(logits_product(part, op.count, words)), {.a = weight, .b = op.x, .d = op.logits + part.first},
               native(stream));
  }
  if (op.soft_cap == 0) return;
  check(cap_logits(op.logits, op.count * words, op.soft_cap, native(stream)), "a soft cap");
}

}  // namespace spillway::models
