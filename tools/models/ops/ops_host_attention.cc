// Causal attention, one piece per (row of the batch, head), in backward per (row, key/value head). Scores and sums are
// fp32; operands of products are of the type that products take, fp32 or bf16 (GemmPath), rounded once.
//
// For 64 queries at a time the scores are kept with keys down and queries across,
//
//            64 queries
//   keys  ┌ k0·q0  k0·q1 … ┐     so that the softmax runs down columns (no horizontal sums), and a tile of
//         │ k1·q0  k1·q1   │     probabilities already is the packed operand of the next product:
//         └  …             ┘     outᵀ[head][64] = valueᵀ[head][keys] · probabilities[keys][64]
//
// Keys come in blocks of 128, as far as one of the queries sees them; masked entries are exact zeros. Backward computes
// the probabilities again with the same calls. Keys of a part of a row are made whole blocks, with zeros that no query
// sees.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tools/models/ops/ops_host.h"

namespace spillway::models {

HostOps::AttentionScratch::AttentionScratch(Carver& carver, const HostOps& ops) {
  const std::size_t head = ops.head_width(), panels = div_up(head, kPanel), depth = padded_depth(head);
  const auto operand = [&](std::size_t elements) { return carver.take<std::byte>(elements * ops.operand_bytes()); };
  const bool fp32 = ops.operands_ == DType::kFloat32;
  // Panels are packed in whole blocks of rows, and oneDNN may read the padding of the last one.
  rows = align_up<std::size_t>(ops.shape_.sequence, kKeyBlock);
  key_rows = operand(rows * head);
  value_rows = value_columns = operand(rows * head);
  key_columns = operand(rows * head);
  query_panel = operand(depth * kPanel);
  dout_panel = operand(depth * kPanel);
  query_rows = operand(panels * kPanel * kPanel);
  dout_rows = operand(panels * kPanel * kPanel);
  scores = carver.take<float>(rows * kPanel);
  dscores = carver.take<float>(rows * kPanel);
  slopes = ops.decoder() ? carver.take<float>(rows * kPanel) : nullptr;
  tile_rows = fp32 ? nullptr : operand(kKeyBlock * kPanel);
  tile_panel = fp32 ? nullptr : operand(kKeyBlock * kPanel);
  result = carver.take<float>(depth * kPanel);
  dkey = carver.take<float>(panels * rows * kPanel);
  dvalue = carver.take<float>(panels * rows * kPanel);
}

template <typename Operation>
std::size_t HostOps::attention_tokens(const Operation& op) const {
  const std::size_t m = op.part.count != 0 ? op.part.count : tokens(op.count);
  require_tensor(op.qkv, m * shape_.qkv_width());
  if (op.rules.starts != nullptr) require_in_hbm(op.rules.starts, m * sizeof(std::uint32_t));
  SPILLWAY_CHECK(op.rules.soft_cap == 0 || decoder(), "a GPT-2 has no soft cap");
  if (op.part.count == 0) {
    SPILLWAY_CHECK(m % shape_.sequence == 0, "attention is over whole rows, or a part of one");
    return m;
  }
  const std::size_t keys = std::size_t{op.part.first} + m;
  SPILLWAY_CHECK(m <= shape_.slice_tokens() && keys <= shape_.sequence, "a part is a slice of a row");
  for (const void* side : {op.part.keys, op.part.values})
    require_rows(side, keys, op.part.stride, shape_.kv_heads() * head_width());
  return m;
}

void HostOps::run(const Attention& op, Stream& stream) {
  const std::size_t m = attention_tokens(op), rows = op.part.count != 0 ? 1 : m / shape_.sequence;
  require_tensor(op.out, m * shape_.query_width());
  stream.launch([this, op, rows](HostWorkers& workers) {
    workers.parallel_for(rows * shape_.heads,
                         [&](std::size_t index) { attention_piece(op, index, workers.current_slot()); });
  });
}

void HostOps::run(const AttentionBackward& op, Stream& stream) {
  const std::size_t m = attention_tokens(op), rows = op.part.count != 0 ? 1 : m / shape_.sequence;
  require_tensor(op.dout, m * shape_.query_width());
  require_tensor(op.dqkv, m * shape_.qkv_width());
  if (op.part.count != 0) {
    require_in_hbm(op.dkv, (op.part.first + m) * 2 * shape_.kv_heads() * head_width() * sizeof(float));
  }
  stream.launch([this, op, rows](HostWorkers& workers) {
    workers.parallel_for(rows * shape_.kv_heads(),
                         [&](std::size_t index) { attention_backward_piece(op, index, workers.current_slot()); });
  });
}

float HostOps::attention_scale(const AttentionRules& rules) const {
  return rules.scale != 0 ? rules.scale : 1.0f / std::sqrt(static_cast<float>(head_width()));
}

HostOps::AttentionRow HostOps::attention_row(const void* qkv, const AttentionPart& part, const AttentionRules& rules,
                                             std::size_t row) const {
  const std::size_t t = shape_.sequence, stride = shape_.qkv_width();
  if (part.count == 0) {
    const std::byte* keys = at(qkv, row * t * stride + shape_.query_width());
    return {.token = row * t,
            .first = 0,
            .queries = t,
            .given = t,
            .keys = t,
            .key = keys,
            .value = at(keys, shape_.kv_heads() * head_width()),
            .stride = stride,
            .starts = rules.starts == nullptr ? nullptr : rules.starts + row * t};
  }
  const std::size_t keys = std::size_t{part.first} + part.count;
  return {.token = 0,
          .first = part.first,
          .queries = part.count,
          .given = keys,
          .keys = align_up(keys, kKeyBlock),
          .key = static_cast<const std::byte*>(part.keys),
          .value = static_cast<const std::byte*>(part.values),
          .stride = part.stride,
          .starts = rules.starts};
}

void HostOps::head_rows(const std::byte* side, const AttentionRow& row, std::byte* rows) const {
  const std::size_t head = head_width(), bytes = head * operand_bytes();
  for (std::size_t r = 0; r < row.given; ++r) {
    if (operands_ == shape_.type)
      std::memcpy(rows + r * bytes, at(side, r * row.stride), bytes);
    else
      kernels_.widen(at(side, r * row.stride), reinterpret_cast<float*>(rows + r * bytes), head);
  }
  std::memset(rows + row.given * bytes, 0, (row.keys - row.given) * bytes);
}

void HostOps::head_columns(const std::byte* side, const AttentionRow& row, std::byte* columns) const {
  const std::size_t head = head_width(), bytes = head * operand_bytes();
  for (std::size_t r = 0; r < row.keys; r += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, row.keys - r), given = std::min(keys, row.given - r);
    if (given < keys) std::memset(columns + r * bytes, 0, keys * bytes);
    transpose_operand(at(side, r * row.stride), row.stride, given, head, columns + r * bytes, keys);
  }
}

// Of scores [keys][64], as a product's left and right operand: the rows themselves, and a packed panel. What is fp32 is
// both already.
HostOps::TileOperands HostOps::tile_operands(const AttentionScratch& s, const float* tile, std::size_t keys,
                                             bool as_rows, bool as_panel) const {
  if (operands_ == DType::kFloat32) return {tile, tile};
  operand_kernels_.pack_tile(tile, keys, as_rows ? s.tile_rows : nullptr, as_panel ? s.tile_panel : nullptr);
  return {s.tile_rows, s.tile_panel};
}

// `query`: the first of 64, counted from the row's first one here.
HostOps::SeenKeys HostOps::seen_keys(const AttentionRules& rules, const AttentionRow& row, std::size_t query) const {
  const std::size_t end = std::min(row.first + query + kPanel, row.first + row.queries);
  SeenKeys seen{.first = 0, .end = std::min(align_up(end, kKeyBlock), row.keys), .lows = {}};
  seen.masked = rules.window != 0 || row.starts != nullptr;
  if (!seen.masked) return seen;
  std::uint32_t lowest = UINT32_MAX;
  for (std::size_t c = 0; c < kPanel; ++c) {
    const std::size_t own = std::min(query + c, row.queries - 1), position = row.first + own;
    const std::size_t window = rules.window == 0 ? 0 : position + 1 - std::min<std::size_t>(rules.window, position + 1);
    // A token sees itself, whatever its start says.
    const std::size_t start = row.starts == nullptr ? 0 : std::min<std::size_t>(row.starts[own], position);
    seen.lows[c] = static_cast<std::uint32_t>(std::max(window, start));
    lowest = std::min(lowest, seen.lows[c]);
  }
  seen.first = lowest / kKeyBlock * kKeyBlock;
  return seen;
}

HostOps::Softmax HostOps::scores(const AttentionScratch& s, const AttentionRules& rules, const AttentionRow& row,
                                 std::size_t query, unsigned slot, void* pad) const {
  const std::size_t head = head_width();
  Softmax softmax{.seen = seen_keys(rules, row, query)};
  const SeenKeys& seen = softmax.seen;
  std::fill_n(softmax.maximum, kPanel, -1e30f);
  softmax.scale = rules.soft_cap != 0 ? 1.0f : attention_scale(rules);
  for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
    const std::size_t keys = std::min(kKeyBlock, seen.end - k);
    float* const tile = s.scores + k * kPanel;
    gemm_.run({keys, head, operands_, false}, slot, s.key_rows + k * head * operand_bytes(), s.query_panel, tile, pad);
    if (rules.soft_cap != 0) {
      fp32_.soft_cap(tile, keys, attention_scale(rules), rules.soft_cap, s.slopes + k * kPanel);
    }
    if (seen.masked || k + keys > row.first + query + 1)
      fp32_.hide(tile, keys, k, row.first + query, seen.masked ? seen.lows : nullptr);
    fp32_.column_maximum(tile, keys, softmax.maximum);
  }
  for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
    fp32_.column_exponentials(s.scores + k * kPanel, std::min(kKeyBlock, seen.end - k), softmax.maximum, softmax.scale,
                              softmax.sum);
  }
  for (std::size_t c = 0; c < kPanel; ++c) softmax.inverse[c] = 1 / softmax.sum[c];
  return softmax;
}

void HostOps::attention_piece(const Attention& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  const AttentionScratch s(carver, *this);
  void* pad = pad_of(slot);
  const std::size_t head = head_width(), stride = shape_.qkv_width(), width = shape_.query_width();
  const std::size_t own = index % shape_.heads, group = own / (shape_.heads / shape_.kv_heads());
  const AttentionRow row = attention_row(op.qkv, op.part, op.rules, index / shape_.heads);
  const std::byte* query = at(op.qkv, row.token * stride + own * head);

  head_rows(at(row.key, group * head), row, s.key_rows);
  head_columns(at(row.value, group * head), row, s.value_columns);
  for (std::size_t first = 0; first < row.queries; first += kPanel) {
    const std::size_t queries = std::min(kPanel, row.queries - first);
    pack_transposed(at(query, first * stride), stride, head, queries, s.query_panel);
    const Softmax softmax = scores(s, op.rules, row, first, slot, pad);
    const SeenKeys& seen = softmax.seen;
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, row.keys - k);
      float* const tile = s.scores + k * kPanel;
      fp32_.scale_columns(tile, keys, softmax.inverse);
      const void* panel = tile_operands(s, tile, keys, false, true).panel;
      gemm_.run({head, keys, operands_, k > seen.first}, slot, s.value_columns + k * head * operand_bytes(), panel,
                s.result, pad);
    }
    kernels_.store_transposed(s.result, head, queries, at(op.out, (row.token + first) * width + own * head), width);
  }
}

// The heads of a group one after the other, so that their sums for its keys and values have one order.
void HostOps::attention_backward_piece(const AttentionBackward& op, std::size_t index, unsigned slot) const {
  Carver carver = slot_carver(slot);
  AttentionScratch s(carver, *this);
  const std::size_t head = head_width(), stride = shape_.qkv_width();
  const std::size_t heads = shape_.heads / shape_.kv_heads(), group = index % shape_.kv_heads();
  const AttentionRow row = attention_row(op.qkv, op.part, op.rules, index / shape_.kv_heads());
  const std::byte *key = at(row.key, group * head), *value = at(row.value, group * head);

  head_rows(key, row, s.key_rows);
  head_rows(value, row, s.value_rows);
  head_columns(key, row, s.key_columns);
  const std::size_t sums = div_up(head, kPanel) * s.rows * kPanel;
  std::fill(s.dkey, s.dkey + sums, 0.0f);
  std::fill(s.dvalue, s.dvalue + sums, 0.0f);
  for (std::size_t h = group * heads; h < (group + 1) * heads; ++h) attention_backward_head(op, row, h, s, slot);

  const std::size_t key_column = group * head, value_column = (shape_.kv_heads() + group) * head;
  std::byte* const dqkv = at(op.dqkv, row.token * stride + shape_.query_width());
  store_key_gradient(op, row, s.dkey, s.rows, key_column, dqkv);
  store_key_gradient(op, row, s.dvalue, s.rows, value_column, dqkv);
}

// `sums`: panels of 64 columns of a head, [rows][64] each. `column`: the head's first, in dkv and, after the queries,
// in dqkv.
void HostOps::store_key_gradient(const AttentionBackward& op, const AttentionRow& row, float* sums, std::size_t rows,
                                 std::size_t column, std::byte* dqkv) const {
  const std::size_t head = head_width(), stride = shape_.qkv_width(), all = 2 * shape_.kv_heads() * head;
  for (std::size_t p = 0; p < head; p += kPanel, sums += rows * kPanel) {
    const std::size_t columns = std::min(kPanel, head - p), tokens = op.part.count != 0 ? row.queries : row.keys;
    if (op.part.count != 0) {
      float* const dkv = op.dkv + column + p;
      fp32_.store_tile(sums, row.given, columns, nullptr, dkv, dkv, all);
      for (std::size_t token = 0; token < tokens; ++token)
        std::copy_n(dkv + (row.first + token) * all, columns, sums + token * kPanel);
    }
    kernels_.store_tile(sums, tokens, columns, nullptr, nullptr, at(dqkv, column + p), stride);
  }
}

void HostOps::attention_backward_head(const AttentionBackward& op, const AttentionRow& row, std::size_t own,
                                      AttentionScratch& s, unsigned slot) const {
  void* pad = pad_of(slot);
  const std::size_t head = head_width(), stride = shape_.qkv_width();
  const std::size_t width = shape_.query_width(), panels = div_up(head, kPanel);
  const std::byte* query = at(op.qkv, row.token * stride + own * head);
  std::byte* dquery = at(op.dqkv, row.token * stride + own * head);
  for (std::size_t first = 0; first < row.queries; first += kPanel) {
    const std::size_t queries = std::min(kPanel, row.queries - first);
    const std::byte* q = at(query, first * stride);
    const std::byte* dout = at(op.dout, (row.token + first) * width + own * head);
    pack_transposed(q, stride, head, queries, s.query_panel);
    pack_transposed(dout, width, head, queries, s.dout_panel);
    for (std::size_t p = 0; p < panels; ++p) {
      // Depth 64 whatever `queries` is: rows past the end are zeros, and one prepared shape serves all blocks.
      const std::size_t columns = std::min(kPanel, head - p * kPanel), bytes = kPanel * kPanel * operand_bytes();
      if (queries < kPanel) {
        std::memset(s.query_rows + p * bytes, 0, bytes);
        std::memset(s.dout_rows + p * bytes, 0, bytes);
      }
      pack(at(q, p * kPanel), stride, queries, columns, s.query_rows + p * bytes);
      pack(at(dout, p * kPanel), width, queries, columns, s.dout_rows + p * bytes);
    }
    Softmax softmax = scores(s, op.rules, row, first, slot, pad);
    const SeenKeys& seen = softmax.seen;
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, row.keys - k), tile = k * kPanel;
      fp32_.scale_columns(s.scores + tile, keys, softmax.inverse);
      gemm_.run({keys, head, operands_, false}, slot, s.value_rows + k * head * operand_bytes(), s.dout_panel,
                s.dscores + tile, pad);
      fp32_.column_dots(s.scores + tile, s.dscores + tile, keys, softmax.dot);
    }
    for (std::size_t k = seen.first; k < seen.end; k += kKeyBlock) {
      const std::size_t keys = std::min(kKeyBlock, row.keys - k), tile = k * kPanel;
      fp32_.softmax_gradient(s.scores + tile, s.dscores + tile, keys, softmax.dot, softmax.scale);
      if (op.rules.soft_cap != 0) fp32_.scale_tile(s.dscores + tile, s.slopes + tile, keys, attention_scale(op.rules));
      const auto add = [&](const void* left, const std::byte* right, float* sums) {
        for (std::size_t p = 0; p < panels; ++p) {
          gemm_.run({keys, kPanel, operands_, true}, slot, left, right + p * kPanel * kPanel * operand_bytes(),
                    sums + (p * s.rows + k) * kPanel, pad);
        }
      };
      add(tile_operands(s, s.scores + tile, keys, true, false).rows, s.dout_rows, s.dvalue);
      const TileOperands d = tile_operands(s, s.dscores + tile, keys, true, true);
      add(d.rows, s.query_rows, s.dkey);
      gemm_.run({head, keys, operands_, k > seen.first}, slot, s.key_columns + k * head * operand_bytes(), d.panel,
                s.result, pad);
    }
    kernels_.store_transposed(s.result, head, queries, at(dquery, first * stride), stride);
  }
}

}  // namespace spillway::models
