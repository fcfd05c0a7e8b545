// The operations on the `host` device; private to tools/models/ops and its tests.
//
// A parallel_for index is a piece of a fixed, shape-given split: a panel of 64 result columns, a (row, head) pair, a
// block of the vocabulary. Pieces write disjoint memory and sum in a fixed order, so any number of threads gives the
// same bits. Scratch is one region shared by the pieces of an operation, and one per worker slot.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "tools/models/ops/carver.h"
#include "tools/models/ops/ops.h"
#include "tools/models/ops/panel_gemm.h"
#include "tools/models/ops/vector_kernels.h"

namespace spillway::models {

// Rows, or elements, that are one piece.
inline constexpr std::size_t kRowsPerPiece = 16;
inline constexpr std::size_t kElementsPerPiece = 16384;

// Splits [0, total) into pieces of `piece`: body(first, count).
template <typename Body>
void for_pieces(HostWorkers& workers, std::size_t total, std::size_t piece, const Body& body) {
  workers.parallel_for(div_up(total, piece), [&](std::size_t index) {
    const std::size_t first = index * piece;
    body(first, std::min(piece, total - first));
  });
}

class HostOps final : public Ops {
 public:
  HostOps(const Shape& shape, unsigned threads, GemmPath path);

  std::vector<std::string> describe() const override;
  std::uint64_t scratch_bytes() const override;
  std::size_t attention_log_sums() const override { return 0; }
  void bind(const Engine& engine, std::span<std::byte> scratch) override;

  void register_host(std::span<std::byte>) override {}
  using Ops::run;
  void upload(const void* host, void* device, std::size_t bytes, Stream& stream) override;
  void download(const void* device, void* host, std::size_t bytes, Stream& stream) override;
  void zero(void* device, std::size_t bytes, Stream& stream) override;

  void run(const Embedding& op, Stream& stream) override;
  void run(const EmbeddingBackward& op, Stream& stream) override;
  void run(const LayerNorm& op, Stream& stream) override;
  void run(const LayerNormBackward& op, Stream& stream) override;
  void run(const Linear& op, Stream& stream) override;
  void run(const LinearGelu& op, Stream& stream) override;
  void run(const LinearBackwardInput& op, Stream& stream) override;
  void run(const LinearBackwardWeight& op, Stream& stream) override;
  void run(const Attention& op, Stream& stream) override;
  void run(const AttentionBackward& op, Stream& stream) override;
  void run(const HeadLoss& op, Stream& stream) override;
  void run(const RmsNorm& op, Stream& stream) override;
  void run(const RmsNormBackward& op, Stream& stream) override;
  void run(const Rotary& op, Stream& stream) override;
  void run(const GatedActivation& op, Stream& stream) override;
  void run(const GatedActivationBackward& op, Stream& stream) override;
  void run(const Add& op, Stream& stream) override;
  void run(const Scale& op, Stream& stream) override;
  void run(const Gelu& op, Stream& stream) override;
  void run(const GeluBackward& op, Stream& stream) override;
  void run(const CopyRows& op, Stream& stream) override;
  void run(const Logits& op, Stream& stream) override;

 private:
  static constexpr std::size_t kRowBlock = 256;                           // rows of a GEMM call
  static constexpr std::size_t kTransposed = 256, kTransposedRows = 512;  // of a piece that is transposed
  static constexpr std::size_t kKeyBlock = 128;                           // attention keys of a GEMM call
  static constexpr std::size_t kSlice = 256;                              // tokens whose logits are in work at one time
  static constexpr std::size_t kVocabBlock = 128;                         // vocabulary rows of a logits tile
  static constexpr std::size_t kGroups = 16;                              // partial sums of the head's dx

  // Per-slot scratch of each kind of operation; the null carver of the constructor measures them.
  struct LinearScratch {
    std::byte* panel;  // packed operand
    float* tile;       // [kRowBlock][kPanel]
    LinearScratch(Carver& carver, const HostOps& ops);
  };
  struct AttentionScratch {
    std::size_t rows;  // T below, in whole blocks of keys
    // Operands of one head: rows [T][head], and in key blocks [head][keys of the block], one after the other.
    std::byte *key_rows, *value_rows, *key_columns, *value_columns;
    std::byte *query_panel, *dout_panel;  // 64 queries as columns, packed: [head][kPanel]
    std::byte *query_rows, *dout_rows;    // the same as rows, packed: head/64 panels of [64][kPanel]
    float *scores, *dscores, *slopes;     // [T][kPanel]: keys down, queries across; slopes: of a soft cap, else null
    std::byte *tile_rows, *tile_panel;    // a block of them as bf16 operands; fp32 is operand as it is: null
    float* result;                        // [head][kPanel]
    float *dkey, *dvalue;                 // head/64 panels of [T][kPanel]
    AttentionScratch(Carver& carver, const HostOps& ops);
  };
  struct HeadScratch {
    float *weight, *tile, *slopes;          // widened block of the embedding; result of a product; of logits' soft cap
    std::byte *by_token, *by_word, *panel;  // dlogits [slice][block] and [block][slice]; packed embedding
    HeadScratch(Carver& carver, const HostOps& ops);
  };
  // Shared by all pieces of the head.
  struct HeadShared {
    std::byte *columns, *rows;      // x of the slice, packed with tokens as columns and with tokens as rows
    float *maximum, *sum;           // [blocks][slice]
    float *target_logit, *log_sum;  // [slice]
    float* partial;                 // [groups][width/64][slice][kPanel]
    float* logits;                  // [blocks][slice/64][kVocabBlock][kPanel]; null: they are not kept
    HeadShared(Carver& carver, const HostOps& ops);
  };
  // One slice of the head: tokens [first, first + count) of the micro-batch.
  struct HeadSlice {
    const HeadLoss& op;
    HeadShared shared;
    std::size_t first, count;
  };

  void linear(const Linear& op, HostWorkers& workers) const;
  void linear_backward_input(const LinearBackwardInput& op, HostWorkers& workers) const;
  void linear_backward_weight(const LinearBackwardWeight& op, HostWorkers& workers) const;
  void layer_norm_backward(const LayerNormBackward& op, HostWorkers& workers) const;
  void rms_norm_backward(const RmsNormBackward& op, HostWorkers& workers) const;
  template <typename Body>
  void each_element(std::initializer_list<const void*> tensors, std::size_t elements, Stream& stream,
                    const Body& body) const;
  void embedding_backward(const EmbeddingBackward& op, HostWorkers& workers) const;
  void attention_piece(const Attention& op, std::size_t index, unsigned slot) const;
  void attention_backward_piece(const AttentionBackward& op, std::size_t index, unsigned slot) const;
  float attention_scale(const AttentionRules& rules) const;
  // Checks an operation's tensors; as many tokens has it.
  template <typename Operation>
  std::size_t attention_tokens(const Operation& op) const;
  // A row's queries, and the keys and values that they see.
  struct AttentionRow {
    std::size_t token;           // of the first query in qkv, out, dout and dqkv
    std::size_t first, queries;  // the first query's position in the row
    std::size_t given, keys;     // keys that there are, and with zeros after them
    const std::byte *key, *value;
    std::size_t stride;
    const std::uint32_t* starts;  // of the queries
  };
  AttentionRow attention_row(const void* qkv, const AttentionPart& part, const AttentionRules& rules,
                             std::size_t row) const;
  // One head's keys or values as operands: AttentionScratch.
  void head_rows(const std::byte* side, const AttentionRow& row, std::byte* rows) const;
  void head_columns(const std::byte* side, const AttentionRow& row, std::byte* columns) const;
  struct TileOperands {
    const void *rows, *panel;
  };
  TileOperands tile_operands(const AttentionScratch& s, const float* tile, std::size_t keys, bool as_rows,
                             bool as_panel) const;
  // What one block of 64 queries sees: keys of [first, end), of which `first` begins a key block.
  struct SeenKeys {
    std::size_t first, end;
    bool masked = false;  // not every query sees all before it
    std::uint32_t lows[kPanel];
  };
  SeenKeys seen_keys(const AttentionRules& rules, const AttentionRow& row, std::size_t query) const;
  // Of 64 queries' scores: VectorKernels.
  struct Softmax {
    SeenKeys seen;
    float scale = 1;
    float maximum[kPanel] = {}, sum[kPanel] = {}, dot[kPanel] = {}, inverse[kPanel] = {};
  };
  // scores[keys][64 queries] = key · query, then their exponentials; times `inverse` they are probabilities.
  Softmax scores(const AttentionScratch& s, const AttentionRules& rules, const AttentionRow& row, std::size_t query,
                 unsigned slot, void* pad) const;
  // Of one head, added to the group's dkey and dvalue.
  void attention_backward_head(const AttentionBackward& op, const AttentionRow& row, std::size_t head,
                               AttentionScratch& s, unsigned slot) const;
  void store_key_gradient(const AttentionBackward& op, const AttentionRow& row, float* sums, std::size_t rows,
                          std::size_t column, std::byte* dqkv) const;
  void head(const HeadLoss& op, HostWorkers& workers) const;
  void head_pack(const HeadSlice& slice, HostWorkers& workers) const;
  void head_statistics(const HeadSlice& slice, HostWorkers& workers) const;
  void head_losses(const HeadSlice& slice) const;
  void head_gradients(const HeadSlice& slice, HostWorkers& workers) const;
  void head_block_gradients(const HeadSlice& slice, std::size_t block, float* partial, unsigned slot) const;
  void head_reduce(const HeadSlice& slice, HostWorkers& workers) const;
  void few_logits(const Logits& op, HostWorkers& workers) const;
  float* head_tile(const HeadSlice& slice, const HeadScratch& s, std::size_t block, std::size_t token) const;
  void head_dlogits(const HeadSlice& slice, const HeadScratch& s, std::size_t block, std::size_t words) const;
  const void* head_weight(const HeadSlice& slice, const HeadScratch& s, std::size_t block) const;

  void prepare_shapes();
  void prepare_adapters(const std::vector<std::pair<std::size_t, std::size_t>>& layers,
                        const std::vector<std::size_t>& token_blocks, const std::vector<std::size_t>& counts);
  void require_in_hbm(const void* data, std::size_t bytes) const;
  // A tensor of the weight type.
  void require_tensor(const void* data, std::size_t elements) const {
    require_in_hbm(data, elements * element_bytes());
  }
  // The first `columns` of each of `rows` tokens, which are `stride` elements apart.
  void require_rows(const void* data, std::size_t rows, std::size_t stride, std::size_t columns) const {
    require_tensor(data, (rows - 1) * stride + columns);
  }
  // Of an operation with this `count`.
  std::size_t tokens(std::uint32_t count) const {
    const std::size_t tokens = count != 0 ? count : shape_.tokens();
    SPILLWAY_CHECK(tokens <= shape_.slice_tokens(), "an operation has no more tokens than a slice");
    return tokens;
  }
  // The rows of a product's next call, where `rows` are left.
  std::size_t token_block(std::size_t rows) const {
    return shape_.forward_alone ? std::min(kRowBlock, std::bit_floor(rows)) : std::min(kRowBlock, rows);
  }
  // x as a GEMM's left operand: itself, or a copy in fp32.
  const void* operand(const void* x, std::size_t rows, std::size_t columns, HostWorkers& workers) const;
  // The same of rows `stride` elements apart.
  const void* operand(const void* x, std::size_t rows, std::size_t columns, std::size_t stride,
                      HostWorkers& workers) const;
  void pack(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, std::byte* panel) const;
  void pack_transposed(const void* x, std::size_t stride, std::size_t depth, std::size_t columns,
                       std::byte* panel) const;
  void transpose_operand(const void* x, std::size_t stride, std::size_t rows, std::size_t columns, std::byte* to,
                         std::size_t to_stride) const;
  void store_gradient(const float* tile, std::size_t rows, std::size_t columns, DType type, bool accumulate,
                      void* gradient, std::size_t offset, std::size_t stride) const;
  Carver slot_carver(unsigned slot) const;
  // The last piece of a slot's scratch: oneDNN's own.
  void* pad_of(unsigned slot) const;

  const std::byte* at(const void* tensor, std::size_t element) const {
    return static_cast<const std::byte*>(tensor) + element * size_of(shape_.type);
  }
  std::byte* at(void* tensor, std::size_t element) const {
    return static_cast<std::byte*>(tensor) + element * size_of(shape_.type);
  }
  std::size_t element_bytes() const { return size_of(shape_.type); }
  std::size_t operand_bytes() const { return size_of(operands_); }
  std::size_t head_width() const { return shape_.head_width(); }
  bool decoder() const { return shape_.key_heads != 0 || shape_.head_size != 0; }
  // Of a layer's tensors.
  std::size_t widest() const;
  std::size_t vocab_blocks() const { return div_up<std::size_t>(shape_.vocabulary, kVocabBlock); }
  std::size_t groups() const { return std::min(kGroups, vocab_blocks()); }
  std::size_t head_tokens() const { return std::min(kSlice, shape_.slice_tokens()); }

  Shape shape_;
  unsigned threads_;
  GemmPath path_;
  DType operands_;                // of GEMMs: fp32 or bf16; fp16 is widened
  const VectorKernels& kernels_;  // of the tensor type
  const VectorKernels& fp32_;
  const VectorKernels& operand_kernels_;
  PanelGemm gemm_;
  std::size_t shared_bytes_ = 0, slot_bytes_ = 0;

  const Engine* engine_ = nullptr;
  std::byte* shared_ = nullptr;
  std::byte* slots_ = nullptr;
};

}  // namespace spillway::models
