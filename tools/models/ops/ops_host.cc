// Plumbing, and the operations that are one matrix product. Rows, attention and the head have files of their own.
#include "tools/models/ops/ops_host.h"

#include <algorithm>
#include <cstring>

#include "spillway/error.h"

namespace spillway::models {
namespace {

DType operand_type(GemmPath path) { return path == GemmPath::kBFloat16 ? DType::kBFloat16 : DType::kFloat32; }

}  // namespace

std::unique_ptr<Ops> create_host_ops(const Shape& shape, unsigned threads) {
  return std::make_unique<HostOps>(shape, threads, choose_gemm_path(shape.type));
}

HostOps::HostOps(const Shape& shape, unsigned threads, GemmPath path)
    : shape_(shape),
      threads_(threads),
      path_(path),
      operands_(operand_type(path)),
      kernels_(vector_kernels(shape.type)),
      fp32_(vector_kernels(DType::kFloat32)),
      operand_kernels_(vector_kernels(operands_)),
      gemm_(threads) {
  SPILLWAY_CHECK(shape.tokens() > 0 && shape.heads > 0, "a shape has tokens and heads");
  SPILLWAY_CHECK(shape.head_size != 0 || shape.width % shape.heads == 0, "a shape is whole heads");
  SPILLWAY_CHECK(shape.heads % shape.kv_heads() == 0, "groups of heads are of one size");
  SPILLWAY_CHECK(shape.slice % (shape.sequence > shape.slice ? kKeyBlock : shape.sequence) == 0 || shape.forward_alone,
                 "a slice is whole rows, or whole blocks of keys");
  prepare_shapes();
  const auto measured = [&]<typename Scratch>() {
    Carver carver(nullptr);
    Scratch(carver, *this);
    return carver.used();
  };
  const std::size_t operand = shape.slice_tokens() * widest() * operand_bytes();  // widened, or transposed
  shared_bytes_ = align_up<std::size_t>(std::max(operand, measured.operator()<HeadShared>()), 4096);
  const std::size_t per_slot = std::max({measured.operator()<LinearScratch>(), measured.operator()<AttentionScratch>(),
                                         measured.operator()<HeadScratch>()});
  slot_bytes_ = align_up<std::size_t>(per_slot + align_up<std::size_t>(gemm_.scratchpad_bytes(), 64), 4096);
}

std::size_t HostOps::widest() const {
  const std::size_t width = shape_.width, inner = shape_.inner, rank = shape_.adapter_rank;
  if (!decoder()) return std::max({inner, 3 * width, rank});
  return std::max({width, 2 * inner, shape_.qkv_width(), rank});
}

void HostOps::prepare_shapes() {
  const std::size_t t = shape_.sequence, head = head_width();
  // Rows 0, unit, 2 unit, … and a shorter last block.
  const auto blocks = [&](std::size_t rows, std::size_t unit, auto&& add) {
    if (rows >= unit) add(unit);
    if (rows % unit != 0) add(rows % unit);
  };
  std::vector<std::size_t> counts = {shape_.slice_tokens()};
  if (shape_.last_slice() != 0) counts.push_back(shape_.last_slice());
  // Blocks of tokens in a product.
  std::vector<std::size_t> token_blocks;
  if (shape_.forward_alone) {
    for (std::size_t rows = kRowBlock; rows > 0; rows /= 2) token_blocks.push_back(rows);
  } else {
    for (const std::size_t count : counts)
      blocks(count, kRowBlock, [&](std::size_t rows) { token_blocks.push_back(rows); });
  }
  const std::size_t width = shape_.width, inner = shape_.inner;
  std::vector<std::pair<std::size_t, std::size_t>> layers = {
      {width, 3 * width}, {width, width}, {width, inner}, {inner, width}};
  if (decoder()) {
    layers = {{width, shape_.query_width()},
              {width, shape_.kv_heads() * head},
              {width, shape_.qkv_width()},
              {shape_.query_width(), width},
              {width, inner},
              {width, 2 * inner},
              {inner, width}};
  }
  for (const auto& [in, out] : layers) {
    for (const std::size_t rows : token_blocks) {
      gemm_.prepare({rows, in, operands_, false});
      if (!shape_.forward_alone) gemm_.prepare({rows, out, operands_, false});
    }
    if (shape_.forward_alone) continue;
    // Rows of a weight's gradient.
    blocks(decoder() ? out : in, kRowBlock, [&](std::size_t rows) {
      for (const std::size_t count : counts) gemm_.prepare({rows, count, operands_, false});
    });
  }
  if (shape_.adapter_rank > 0) prepare_adapters(layers, token_blocks, counts);
  // Parts of a row have whole blocks of keys.
  const bool parts = shape_.forward_alone || shape_.sequence > shape_.slice_tokens();
  blocks(parts ? kKeyBlock : t, kKeyBlock, [&](std::size_t keys) {
    gemm_.prepare({keys, head, operands_, false});
    gemm_.prepare({keys, kPanel, operands_, true});
    for (const bool accumulate : {false, true}) gemm_.prepare({head, keys, operands_, accumulate});
  });
  blocks(shape_.vocabulary, kVocabBlock, [&](std::size_t words) {
    gemm_.prepare({words, width, operands_, false});
    if (shape_.forward_alone) return;
    for (const std::size_t count : counts) {
      blocks(count, kSlice, [&](std::size_t tokens) {
        gemm_.prepare({words, tokens, operands_, false});
        gemm_.prepare({tokens, words, operands_, true});
      });
    }
  });
}

// What the products of an adapter have beside those of the product that it is of.
void HostOps::prepare_adapters(const std::vector<std::pair<std::size_t, std::size_t>>& layers,
                               const std::vector<std::size_t>& token_blocks, const std::vector<std::size_t>& counts) {
  for (const std::size_t rows : token_blocks) gemm_.prepare({rows, shape_.adapter_rank, operands_, false});
  if (shape_.forward_alone) return;
  const auto gradient_rows = [&](std::size_t rows) {
    for (const std::size_t count : counts) {
      if (rows >= kRowBlock) gemm_.prepare({kRowBlock, count, operands_, false});
      if (rows % kRowBlock != 0) gemm_.prepare({rows % kRowBlock, count, operands_, false});
    }
  };
  gradient_rows(shape_.adapter_rank);
  for (const auto& [in, out] : layers) gradient_rows(out);
}

std::vector<std::string> HostOps::describe() const {
  return {describe_gemm_path(shape_.type, path_) + ", in panels of 64 columns by oneDNN"};
}

std::uint64_t HostOps::scratch_bytes() const { return shared_bytes_ + threads_ * slot_bytes_; }

void HostOps::bind(const Engine& engine, std::span<std::byte> scratch) {
  SPILLWAY_CHECK(scratch.size() >= scratch_bytes(), "scratch is what scratch_bytes() asked for");
  engine_ = &engine;
  require_in_hbm(scratch.data(), scratch.size());
  shared_ = scratch.data();
  slots_ = shared_ + shared_bytes_;
}

void HostOps::require_in_hbm(const void* data, std::size_t bytes) const {
  SPILLWAY_CHECK(engine_ != nullptr, "operations must be bound to an engine first");
  SPILLWAY_CHECK(engine_->in_hbm(data, bytes), "operations work inside the HBM arena only");
}

Carver HostOps::slot_carver(unsigned slot) const {
  SPILLWAY_CHECK(slot < threads_, "the engine has more compute threads than the operations were made for");
  return Carver(slots_ + slot * slot_bytes_);
}

void* HostOps::pad_of(unsigned slot) const {
  return slots_ + (slot + 1) * slot_bytes_ - align_up<std::size_t>(gemm_.scratchpad_bytes(), 64);
}

HostOps::LinearScratch::LinearScratch(Carver& carver, const HostOps& ops) {
  const std::size_t depth = std::max(ops.widest(), ops.shape_.slice_tokens());
  panel = carver.take<std::byte>(padded_depth(depth) * kPanel * ops.operand_bytes());
  tile = carver.take<float>(kRowBlock * kPanel);
}

void HostOps::pack(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, std::byte* panel) const {
  if (operands_ == shape_.type)
    kernels_.pack(x, stride, depth, columns, panel);
  else
    kernels_.pack_widen(x, stride, depth, columns, reinterpret_cast<float*>(panel));
}

void HostOps::pack_transposed(const void* x, std::size_t stride, std::size_t depth, std::size_t columns,
                              std::byte* panel) const {
  if (operands_ == shape_.type)
    kernels_.pack_transposed(x, stride, depth, columns, panel);
  else
    kernels_.pack_transposed_widen(x, stride, depth, columns, reinterpret_cast<float*>(panel));
}

void HostOps::transpose_operand(const void* x, std::size_t stride, std::size_t rows, std::size_t columns, std::byte* to,
                                std::size_t to_stride) const {
  if (operands_ == shape_.type)
    kernels_.transpose(x, stride, rows, columns, to, to_stride);
  else
    kernels_.transpose_widen(x, stride, rows, columns, reinterpret_cast<float*>(to), to_stride);
}

const void* HostOps::operand(const void* x, std::size_t rows, std::size_t columns, HostWorkers& workers) const {
  if (operands_ == shape_.type) return x;
  float* wide = reinterpret_cast<float*>(shared_);
  for_pieces(workers, rows * columns, kElementsPerPiece,
             [&](std::size_t first, std::size_t count) { kernels_.widen(at(x, first), wide + first, count); });
  return wide;
}

const void* HostOps::operand(const void* x, std::size_t rows, std::size_t columns, std::size_t stride,
                             HostWorkers& workers) const {
  if (stride == columns) return operand(x, rows, columns, workers);
  for_pieces(workers, rows, kRowsPerPiece, [&](std::size_t first, std::size_t count) {
    for (std::size_t row = first; row < first + count; ++row) {
      std::byte* const to = shared_ + row * columns * operand_bytes();
      if (operands_ == shape_.type)
        std::memcpy(to, at(x, row * stride), columns * operand_bytes());
      else
        kernels_.widen(at(x, row * stride), reinterpret_cast<float*>(to), columns);
    }
  });
  return shared_;
}

void HostOps::store_gradient(const float* tile, std::size_t rows, std::size_t columns, DType type, bool accumulate,
                             void* gradient, std::size_t offset, std::size_t stride) const {
  if (type == DType::kFloat32) {
    float* to = static_cast<float*>(gradient) + offset;
    fp32_.store_tile(tile, rows, columns, nullptr, accumulate ? to : nullptr, to, stride);
  } else {
    kernels_.store_tile(tile, rows, columns, nullptr, nullptr, at(gradient, offset), stride);
  }
}

void HostOps::upload(const void* host, void* device, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  stream.launch([=](HostWorkers&) { std::memcpy(device, host, bytes); });
}

void HostOps::download(const void* device, void* host, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  stream.launch([=](HostWorkers&) { std::memcpy(host, device, bytes); });
}

void HostOps::zero(void* device, std::size_t bytes, Stream& stream) {
  require_in_hbm(device, bytes);
  stream.launch([=](HostWorkers& workers) {
    for_pieces(workers, bytes, 4 * kElementsPerPiece, [&](std::size_t first, std::size_t count) {
      std::memset(static_cast<std::byte*>(device) + first, 0, count);
    });
  });
}

void HostOps::run(const Linear& op, Stream& stream) {
  const std::size_t m = tokens(op.count), e = element_bytes(), in = op.in, out = op.out;
  const std::size_t stride = op.y_stride == 0 ? out : op.y_stride;
  require_in_hbm(op.x, m * in * e);
  require_in_hbm(op.weight, in * out * e);
  SPILLWAY_CHECK(op.bias != nullptr || op.layout == Layout::kOutIn, "GPT-2's products have biases");
  if (op.bias != nullptr) require_in_hbm(op.bias, out * e);
  require_rows(op.y, m, stride, out);
  if (op.residual != nullptr) require_rows(op.residual, m, stride, out);
  stream.launch([this, op](HostWorkers& workers) { linear(op, workers); });
}

void HostOps::linear(const Linear& op, HostWorkers& workers) const {
  const std::size_t m = tokens(op.count), in = op.in, out = op.out;
  const std::size_t stride = op.y_stride == 0 ? out : op.y_stride;
  const auto* x = static_cast<const std::byte*>(operand(op.x, m, in, workers));
  for_pieces(workers, out, kPanel, [&](std::size_t first, std::size_t count) {
    const unsigned slot = workers.current_slot();
    Carver carver = slot_carver(slot);
    const LinearScratch s(carver, *this);
    if (op.layout == Layout::kInOut)
      pack(at(op.weight, first), out, in, count, s.panel);
    else
      pack_transposed(at(op.weight, first * in), in, in, count, s.panel);
    for (std::size_t row = 0, rows = 0; row < m; row += rows) {
      rows = token_block(m - row);
      gemm_.run({rows, in, operands_, false}, slot, x + row * in * operand_bytes(), s.panel, s.tile, pad_of(slot));
      const std::size_t offset = row * stride + first;
      kernels_.store_tile(s.tile, rows, count, op.bias == nullptr ? nullptr : at(op.bias, first),
                          op.residual == nullptr ? nullptr : at(op.residual, offset), at(op.y, offset), stride);
    }
  });
}

void HostOps::run(const LinearGelu& op, Stream& stream) {
  run(Linear{.in = op.in,
             .out = op.out,
             .x = op.x,
             .weight = op.weight,
             .bias = op.bias,
             .residual = nullptr,
             .y = op.before,
             .count = op.count},
      stream);
  run(Gelu{.before = op.before, .after = op.after, .columns = op.out, .count = op.count}, stream);
}

void HostOps::run(const LinearBackwardInput& op, Stream& stream) {
  const std::size_t m = tokens(op.count), e = element_bytes(), in = op.in, out = op.out;
  require_rows(op.dy, m, op.dy_stride == 0 ? out : op.dy_stride, out);
  require_in_hbm(op.weight, in * out * e);
  require_in_hbm(op.dx, m * in * e);
  if (op.residual != nullptr) require_in_hbm(op.residual, m * in * e);
  SPILLWAY_CHECK(op.gelu_before == nullptr || op.residual == nullptr, "gelu's gradient is of the product alone");
  stream.launch([this, op](HostWorkers& workers) { linear_backward_input(op, workers); });
  if (op.gelu_before == nullptr) return;
  run(GeluBackward{.before = op.gelu_before, .dx = op.dx, .columns = op.in, .count = op.count}, stream);
}

// dx = dy · weightᵀ: a panel is 64 rows of the weight [in][out], transposed as it is packed, or 64 columns of
// [out][in].
void HostOps::linear_backward_input(const LinearBackwardInput& op, HostWorkers& workers) const {
  const std::size_t m = tokens(op.count), in = op.in, out = op.out;
  const auto* dy =
      static_cast<const std::byte*>(operand(op.dy, m, out, op.dy_stride == 0 ? out : op.dy_stride, workers));
  for_pieces(workers, in, kPanel, [&](std::size_t first, std::size_t count) {
    const unsigned slot = workers.current_slot();
    Carver carver = slot_carver(slot);
    const LinearScratch s(carver, *this);
    if (op.layout == Layout::kInOut)
      pack_transposed(at(op.weight, first * out), out, out, count, s.panel);
    else
      pack(at(op.weight, first), in, out, count, s.panel);
    for (std::size_t row = 0, rows = 0; row < m; row += rows) {
      rows = token_block(m - row);
      const std::size_t offset = row * in + first;
      gemm_.run({rows, out, operands_, false}, slot, dy + row * out * operand_bytes(), s.panel, s.tile, pad_of(slot));
      kernels_.store_tile(s.tile, rows, count, nullptr, op.residual == nullptr ? nullptr : at(op.residual, offset),
                          at(op.dx, offset), in);
    }
  });
}

void HostOps::run(const LinearBackwardWeight& op, Stream& stream) {
  const std::size_t m = tokens(op.count), e = element_bytes(), in = op.in, out = op.out;
  require_in_hbm(op.x, m * in * e);
  require_rows(op.dy, m, op.dy_stride == 0 ? out : op.dy_stride, out);
  require_in_hbm(op.dweight, in * out * size_of(op.gradient));
  if (op.dbias != nullptr) require_in_hbm(op.dbias, out * size_of(op.gradient));
  SPILLWAY_CHECK(!op.accumulate || op.gradient == DType::kFloat32, "sums of gradients are fp32");
  stream.launch([this, op](HostWorkers& workers) { linear_backward_weight(op, workers); });
}

// dweight = xᵀ · dy [in][out], or dyᵀ · x [out][in]: the left one is transposed once, for all panels of the right one.
void HostOps::linear_backward_weight(const LinearBackwardWeight& op, HostWorkers& workers) const {
  struct Side {
    const void* tensor;
    std::size_t columns, stride;
  };
  const std::size_t m = tokens(op.count);
  const Side x{op.x, op.in, op.in}, dy{op.dy, op.out, op.dy_stride == 0 ? op.out : op.dy_stride};
  const Side &left = op.layout == Layout::kInOut ? x : dy, &right = op.layout == Layout::kInOut ? dy : x;
  // Pieces of neighbouring columns: far more than what one cache line of a row holds.
  const std::size_t strips = div_up(left.columns, kTransposed);
  workers.parallel_for(strips * div_up(m, kTransposedRows), [&](std::size_t index) {
    const std::size_t first = index % strips * kTransposed, row = index / strips * kTransposedRows;
    transpose_operand(at(left.tensor, row * left.stride + first), left.stride, std::min(kTransposedRows, m - row),
                      std::min(kTransposed, left.columns - first), shared_ + (first * m + row) * operand_bytes(), m);
  });
  for_pieces(workers, right.columns, kPanel, [&](std::size_t first, std::size_t count) {
    const unsigned slot = workers.current_slot();
    Carver carver = slot_carver(slot);
    const LinearScratch s(carver, *this);
    pack(at(right.tensor, first), right.stride, m, count, s.panel);
    for (std::size_t row = 0; row < left.columns; row += kRowBlock) {
      const std::size_t rows = std::min(kRowBlock, left.columns - row);
      gemm_.run({rows, m, operands_, false}, slot, shared_ + row * m * operand_bytes(), s.panel, s.tile, pad_of(slot));
      store_gradient(s.tile, rows, count, op.gradient, op.accumulate, op.dweight, row * right.columns + first,
                     right.columns);
    }
  });
  if (op.dbias == nullptr) return;
  for_pieces(workers, op.out, kPanel, [&](std::size_t first, std::size_t count) {
    float sum[kPanel] = {};
    kernels_.column_sums(at(op.dy, first), dy.stride, m, count, sum);
    store_gradient(sum, 1, count, op.gradient, op.accumulate, op.dbias, first, op.out);
  });
}

}  // namespace spillway::models
