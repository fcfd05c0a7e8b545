// Causal attention, one piece per (row of the batch, head), in backward per (row, key/value head), all in fp32.
//
// For 64 queries at a time the scores are kept with keys down and queries across,
//
//            64 queries
//   keys  ┌ k0·q0  k0·q1 … ┐     so that the softmax runs down columns (no horizontal sums), and a tile of
//         │ k1·q0  k1·q1   │     probabilities already is the packed operand of the next product:
//         └  …             ┘     outᵀ[head][64] = valueᵀ[head][keys] · probabilities[keys][64]
//
// Keys come in blocks of 128, as far as one of the queries sees them; masked entries are exact zeros. Backward computes
// the probabilities again with the same calls.
#include <algorithm>
#include <cmath>
#include <utility>

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
  slopes = ops.decoder() ? carver.take<float>(rows * kPanel) : nullptr;
  result = carver.take<float>(depth * kPanel);
  dkey = carver.take<float>(panels * t * kPanel);
  dvalue = carver.take<float>(panels * t * kPanel);
}

void HostOps::run(const Attention& op, Stream& stream) {
  const std::size_t m = shape_.tokens(), e = element_bytes();
  require_in_hbm(op.qkv, m * shape_.qkv_width() * e);
  require_in_hbm(op.out, m * shape_.query_width() * e);
  if (op.rules.starts != nullptr) require_in_hbm(op.rules.starts, m * sizeof(std::uint32_t));
  SPILLWAY_CHECK(op.rules.soft_cap == 0 || decoder(), "a GPT-2 has no soft cap");
  stream.launch([this, op](HostWorkers& workers) {
    workers.parallel_for(static_cast<std::size_t>(shape_.batch) * shape_.heads,
                         [&](std::size_t index) { attention_piece(op, index, workers.current_slot()); });
  });
}

void HostOps::run(const AttentionBackward& op, Stream& stream) {
  const std::size_t m = shape_.tokens(), e = element_bytes();
  require_in_hbm(op.qkv, m * shape_.qkv_width() * e);
  require_in_hbm(op.dout, m * shape_.query_width() * e);
  require_in_hbm(op.dqkv, m * shape_.qkv_width() * e);
  if (op.rules.starts != nullptr) require_in_hbm(op.rules.starts, m * sizeof(std::uint32_t));
  SPILLWAY_CHECK(op.rules.soft_cap == 0 || decoder(), "a GPT-2 has no soft cap");
  stream.launch([this, op](HostWorkers& workers) {
    workers.parallel_for(static_cast<std::size_t>(shape_.batch) * shape_.kv_heads(),
                         [&](std::size_t index) { attention_backward_piece(op, index, workers.current_slot()); });
  });
}

float HostOps::attention_scale(const AttentionRules& rules) const {
  return rules.scale != 0 ? rules.scale : 1.0f / std::sqrt(static_cast<float>(head_width()));
}

// `row`: the first token of the batch's row.
HostOps::SeenKeys HostOps::seen_keys(const AttentionRules& rules, std::size_t row, std::size_t first_query) const {
  const std::size_t t = shape_.sequence;
  SeenKeys seen{.first = 0, .end = std::min(align_up(std::min(first_query + kPanel, t), kKeyBlock), t), .lows = {}};
  seen.masked = rules.window != 0 || rules.starts != nullptr;
  if (!seen.masked) return seen;
  std::uint32_t lowest = UINT32_MAX;
  for (std::size_t c = 0; c < kPanel; ++c) {
    const std::size_t query = std::min(first_query + c, t - 1);
    const std::size_t window = rules.window == 0 ? 0 : query + 1 - std::min<std::size_t>(rules.window, query + 1);
    // A token sees itself, whatever its start says.
    const std::size_t start = rules.starts == nullptr ? 0 : std::min<std::size_t>(rules.starts[row + query], query);
    seen.lows[c] = static_cast<std::uint32_t>(std::max(window, start));
    lowest = std::min(lowest, seen.lows[c]);
  }
  seen.first = lowest / kKeyBlock * kKeyBlock;
  return seen;
}

HostOps::SeenKeys HostOps::probabilities(const AttentionScratch& s, const AttentionRules& rules, std::size_t row,
                                         std::size_t first_query, unsigned slot, void* pad) const {
  const std::size_t head = head_width();
  const SeenKeys seen = seen_keys(rules, row, first_query);
  for (std::size_t key = seen.first; key < seen.end; key += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, seen.end - key);
    gemm_.run({keys, head, DType::kFloat32, false}, slot, s.key_rows + key * head, s.query_panel,
              s.scores + key * kPanel, pad);
  }
  float* const scores = s.scores + seen.first * kPanel;
  const std::size_t rows = seen.end - seen.first;
  float scale = attention_scale(rules);
  if (rules.soft_cap != 0) {
    fp32_.soft_cap(scores, rows, std::exchange(scale, 1.0f), rules.soft_cap, s.slopes + seen.first * kPanel);
  }
  if (seen.masked)
    fp32_.masked_softmax(scores, rows, seen.first, first_query, seen.lows, scale);
  else
    fp32_.causal_softmax(scores, rows, first_query, scale);
  return seen;
}

void HostOps::attention_piece(const Attention& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  const AttentionScratch s(carver, *this);
  void* pad = pad_of(slot);
  const std::size_t t = shape_.sequence, head = head_width(), stride = shape_.qkv_width();
  const std::size_t row = index / shape_.heads * t, own = index % shape_.heads, width = shape_.query_width();
  const std::size_t group = own / (shape_.heads / shape_.kv_heads()), key_width = shape_.kv_heads() * head;
  const std::byte* query = at(op.qkv, row * stride + own * head);
  const std::byte* key = at(op.qkv, row * stride + width + group * head);
  const std::byte* value = at(key, key_width);

  for (std::size_t r = 0; r < t; ++r) kernels_.widen(at(key, r * stride), s.key_rows + r * head, head);
  for (std::size_t r = 0; r < t; r += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, t - r);
    kernels_.transpose_widen(at(value, r * stride), stride, keys, head, s.value_columns + r * head, keys);
  }
  for (std::size_t first = 0; first < t; first += kPanel) {
    const std::size_t queries = std::min(kPanel, t - first);
    kernels_.pack_transposed_widen(at(query, first * stride), stride, head, queries, s.query_panel);
    const SeenKeys seen = probabilities(s, op.rules, row, first, slot, pad);
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({head, keys, DType::kFloat32, k > seen.first}, slot, s.value_columns + k * head, s.scores + k * kPanel,
                s.result, pad);
    }
    kernels_.store_transposed(s.result, head, queries, at(op.out, (row + first) * width + own * head), width);
  }
}

// The heads of a group one after the other, so that their sums for its keys and values have one order.
void HostOps::attention_backward_piece(const AttentionBackward& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  AttentionScratch s(carver, *this);
  const std::size_t t = shape_.sequence, head = head_width(), stride = shape_.qkv_width();
  const std::size_t heads = shape_.heads / shape_.kv_heads(), key_width = shape_.kv_heads() * head;
  const std::size_t row = index / shape_.kv_heads() * t, group = index % shape_.kv_heads();
  const std::size_t panels = div_up(head, kPanel);
  const std::size_t at_key = row * stride + shape_.query_width() + group * head;
  const std::byte *key = at(op.qkv, at_key), *value = at(op.qkv, at_key + key_width);

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
  for (std::size_t h = group * heads; h < (group + 1) * heads; ++h) attention_backward_head(op, row, h, s, slot);
  for (std::size_t p = 0; p < panels; ++p) {
    const std::size_t columns = std::min(kPanel, head - p * kPanel);
    kernels_.store_tile(s.dkey + p * t * kPanel, t, columns, nullptr, nullptr, at(op.dqkv, at_key + p * kPanel),
                        stride);
    kernels_.store_tile(s.dvalue + p * t * kPanel, t, columns, nullptr, nullptr,
                        at(op.dqkv, at_key + key_width + p * kPanel), stride);
  }
}

void HostOps::attention_backward_head(const AttentionBackward& op, std::size_t row, std::size_t own,
                                      AttentionScratch& s, unsigned slot) const {
  void* pad = pad_of(slot);
  const std::size_t t = shape_.sequence, head = head_width(), stride = shape_.qkv_width();
  const std::size_t width = shape_.query_width(), panels = div_up(head, kPanel);
  const std::byte* query = at(op.qkv, row * stride + own * head);
  std::byte* dquery = at(op.dqkv, row * stride + own * head);
  const float scale = attention_scale(op.rules);
  for (std::size_t first = 0; first < t; first += kPanel) {
    const std::size_t queries = std::min(kPanel, t - first);
    const std::byte* q = at(query, first * stride);
    const std::byte* dout = at(op.dout, (row + first) * width + own * head);
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
    const SeenKeys seen = probabilities(s, op.rules, row, first, slot, pad);
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({keys, head, DType::kFloat32, false}, slot, s.value_rows + k * head, s.dout_panel,
                s.dscores + k * kPanel, pad);
    }
    const std::size_t begin = seen.first * kPanel, rows = seen.end - seen.first;
    const bool capped = op.rules.soft_cap != 0;
    fp32_.softmax_backward(s.scores + begin, s.dscores + begin, rows, capped ? 1.0f : scale);
    if (capped) fp32_.scale_tile(s.dscores + begin, s.slopes + begin, rows, scale);
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, t - k);
      gemm_.run({head, keys, DType::kFloat32, k > seen.first}, slot, s.key_columns + k * head, s.dscores + k * kPanel,
                s.result, pad);
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
}

}  // namespace spillway::models
