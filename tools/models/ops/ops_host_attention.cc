// Causal attention, one piece per (row of the batch, head), all in fp32.
//
// For 64 queries at a time the scores are kept with keys down and queries across,
//
//            64 queries
//   keys  ┌ k0·q0  k0·q1 … ┐     so that the softmax runs down columns (no horizontal sums), and a tile of
//         │ k1·q0  k1·q1   │     probabilities already is the packed operand of the next product:
//         └  …             ┘     outᵀ[head][64] = valueᵀ[head][keys] · probabilities[keys][64]
//
// Keys come in blocks of 128, as far as the last query sees them; masked entries are exact zeros. Backward computes the
// probabilities again with the same calls.
#include <algorithm>
#include <cmath>

#include "tools/models/ops/ops_host.h"

namespace spillway::models {

HostOps::AttentionScratch::AttentionScratch(Carver& carver, const HostOps& ops) {
  const std::size_t t = ops.shape_.sequence, head = ops.head_width();
  const std::size_t panels = div_up(head, kPanel);
  // Panels are packed in whole blocks of rows, and oneDNN may read the padding of the last one.
  const std::size_t rows = align_up(t, kKeyBlock), depth = padded_depth(head);
  key_rows = carver.take<float>(t * head);
  value_rows = carver.take<float>(t * head);
  key_columns = carver.take<float>(t * head);
  value_columns = carver.take<float>(t * head);
  query_panel = carver.take<float>(depth * kPanel);
  dout_panel = carver.take<float>(depth * kPanel);
  query_rows = carver.take<float>(panels * kPanel * kPanel);
  dout_rows = carver.take<float>(panels * kPanel * kPanel);
  scores = carver.take<float>(rows * kPanel);
  dscores = carver.take<float>(rows * kPanel);
  result = carver.take<float>(depth * kPanel);
  dkey = carver.take<float>(panels * t * kPanel);
  dvalue = carver.take<float>(panels * t * kPanel);
}

void HostOps::run(const Attention& op, Stream& stream) {
  const std::size_t bytes = shape_.tokens() * shape_.width * element_bytes();
  require_in_hbm(op.qkv, 3 * bytes);
  require_in_hbm(op.out, bytes);
  stream.launch([this, op](HostWorkers& workers) {
    workers.parallel_for(static_cast<std::size_t>(shape_.batch) * shape_.heads,
                         [&](std::size_t index) { attention_piece(op, index, workers.current_slot()); });
  });
}

void HostOps::run(const AttentionBackward& op, Stream& stream) {
  const std::size_t bytes = shape_.tokens() * shape_.width * element_bytes();
  require_in_hbm(op.qkv, 3 * bytes);
  require_in_hbm(op.dout, bytes);
  require_in_hbm(op.dqkv, 3 * bytes);
  stream.launch([this, op](HostWorkers& workers) {
    workers.parallel_for(static_cast<std::size_t>(shape_.batch) * shape_.heads,
                         [&](std::size_t index) { attention_backward_piece(op, index, workers.current_slot()); });
  });
}

std::size_t HostOps::probabilities(const AttentionScratch& s, std::size_t first_query, unsigned slot, void* pad) const {
  const std::size_t t = shape_.sequence, head = head_width();
  const std::size_t seen = std::min(align_up(std::min(first_query + kPanel, t), kKeyBlock), t);
  for (std::size_t key = 0; key < seen; key += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, t - key);
    gemm_.run({keys, head, DType::kFloat32, false}, slot, s.key_rows + key * head, s.query_panel,
              s.scores + key * kPanel, pad);
  }
  fp32_.causal_softmax(s.scores, seen, first_query, 1.0f / std::sqrt(static_cast<float>(head)));
  return seen;
}

void HostOps::attention_piece(const Attention& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  const AttentionScratch s(carver, *this);
  void* pad = pad_of(slot);
  const std::size_t t = shape_.sequence, head = head_width(), width = shape_.width, stride = 3 * width;
  const std::size_t row = index / shape_.heads * t, column = index % shape_.heads * head;
  const std::byte* query = at(op.qkv, row * stride + column);
  const std::byte* key = at(query, width);
  const std::byte* value = at(query, 2 * width);

  for (std::size_t r = 0; r < t; ++r) kernels_.widen(at(key, r * stride), s.key_rows + r * head, head);
  for (std::size_t r = 0; r < t; r += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, t - r);
    kernels_.transpose_widen(at(value, r * stride), stride, keys, head, s.value_columns + r * head, keys);
  }
  for (std::size_t first = 0; first < t; first += kPanel) {
    const std::size_t queries = std::min(kPanel, t - first);
    kernels_.pack_transposed_widen(at(query, first * stride), stride, head, queries, s.query_panel);
    const std::size_t seen = probabilities(s, first, slot, pad);
    for (std::size_t k = 0; k < seen; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({head, keys, DType::kFloat32, k > 0}, slot, s.value_columns + k * head, s.scores + k * kPanel, s.result,
                pad);
    }
    kernels_.store_transposed(s.result, head, queries, at(op.out, (row + first) * width + column), width);
  }
}

void HostOps::attention_backward_piece(const AttentionBackward& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  const AttentionScratch s(carver, *this);
  void* pad = pad_of(slot);
  const std::size_t t = shape_.sequence, head = head_width(), width = shape_.width, stride = 3 * width;
  const std::size_t row = index / shape_.heads * t, column = index % shape_.heads * head;
  const std::size_t panels = div_up(head, kPanel);
  const std::byte* query = at(op.qkv, row * stride + column);
  const std::byte* key = at(query, width);
  const std::byte* value = at(query, 2 * width);
  std::byte* dquery = at(op.dqkv, row * stride + column);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head));

  for (std::size_t r = 0; r < t; ++r) {
    kernels_.widen(at(key, r * stride), s.key_rows + r * head, head);
    kernels_.widen(at(value, r * stride), s.value_rows + r * head, head);
  }
  for (std::size_t r = 0; r < t; r += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, t - r);
    kernels_.transpose_widen(at(key, r * stride), stride, keys, head, s.key_columns + r * head, keys);
  }
  std::fill(s.dkey, s.dkey + panels * t * kPanel, 0.0f);
  std::fill(s.dvalue, s.dvalue + panels * t * kPanel, 0.0f);

  for (std::size_t first = 0; first < t; first += kPanel) {
    const std::size_t queries = std::min(kPanel, t - first);
    const std::byte* q = at(query, first * stride);
    const std::byte* dout = at(op.dout, (row + first) * width + column);
    kernels_.pack_transposed_widen(q, stride, head, queries, s.query_panel);
    kernels_.pack_transposed_widen(dout, width, head, queries, s.dout_panel);
    for (std::size_t p = 0; p < panels; ++p) {
      // Depth 64 whatever `queries` is: rows past the end are zeros, and one prepared shape serves all blocks.
      const std::size_t columns = std::min(kPanel, head - p * kPanel), offset = p * kPanel * kPanel;
      std::fill(s.query_rows + offset, s.query_rows + offset + kPanel * kPanel, 0.0f);
      std::fill(s.dout_rows + offset, s.dout_rows + offset + kPanel * kPanel, 0.0f);
      kernels_.pack_widen(at(q, p * kPanel), stride, queries, columns, s.query_rows + offset);
      kernels_.pack_widen(at(dout, p * kPanel), width, queries, columns, s.dout_rows + offset);
    }
    const std::size_t seen = probabilities(s, first, slot, pad);
    for (std::size_t k = 0; k < seen; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({keys, head, DType::kFloat32, false}, slot, s.value_rows + k * head, s.dout_panel,
                s.dscores + k * kPanel, pad);
    }
    fp32_.softmax_backward(s.scores, s.dscores, seen, scale);
    for (std::size_t k = 0; k < seen; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({head, keys, DType::kFloat32, k > 0}, slot, s.key_columns + k * head, s.dscores + k * kPanel, s.result,
                pad);
      for (std::size_t p = 0; p < panels; ++p) {
        const std::size_t sums = (p * t + k) * kPanel, operand = p * kPanel * kPanel;
        gemm_.run({keys, kPanel, DType::kFloat32, true}, slot, s.scores + k * kPanel, s.dout_rows + operand,
                  s.dvalue + sums, pad);
        gemm_.run({keys, kPanel, DType::kFloat32, true}, slot, s.dscores + k * kPanel, s.query_rows + operand,
                  s.dkey + sums, pad);
      }
    }
    kernels_.store_transposed(s.result, head, queries, at(dquery, first * stride), stride);
  }
  for (std::size_t p = 0; p < panels; ++p) {
    const std::size_t columns = std::min(kPanel, head - p * kPanel);
    kernels_.store_tile(s.dkey + p * t * kPanel, t, columns, nullptr, nullptr, at(dquery, width + p * kPanel), stride);
    kernels_.store_tile(s.dvalue + p * t * kPanel, t, columns, nullptr, nullptr, at(dquery, 2 * width + p * kPanel),
                        stride);
  }
}

}  // namespace spillway::models
