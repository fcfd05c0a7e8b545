// The operations on the `host` device; private to tools/models/ops and its tests.
//
// A parallel_for index is a piece of a fixed, shape-given split: a panel of 64 result columns, a (row, head) pair, a
// block of the vocabulary. Pieces write disjoint memory and sum in a fixed order, so any number of threads gives the
// same bits. Scratch is one region shared by the pieces of an operation, and one per worker slot.
#pragma once

#include <algorithm>
#include <cstdint>
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

 private:
  static constexpr std::size_t kRowBlock = 256;    // rows of a GEMM call
  static constexpr std::size_t kKeyBlock = 128;    // attention keys of a GEMM call
  static constexpr std::size_t kSlice = 256;       // tokens whose logits are in work at one time
  static constexpr std::size_t kVocabBlock = 128;  // vocabulary rows of a logits tile
  static constexpr std::size_t kGroups = 16;       // partial sums of the head's dx

  // Per-slot scratch of each kind of operation; the null carver of the constructor measures them.
  struct LinearScratch {
    std::byte* panel;  // packed operand
    float* tile;       // [kRowBlock][kPanel]
    LinearScratch(Carver& carver, const HostOps& ops);
  };
  struct AttentionScratch {
    // fp32 copies of one head: rows [T][head], and in key blocks [head][keys of the block], one after the other.
    float *key_rows, *value_rows, *key_columns, *value_columns;
    float *query_panel, *dout_panel;   // [head][kPanel]: 64 queries as columns
    float *query_rows, *dout_rows;     // the same as rows, packed: head/64 panels of [64][kPanel]
    float *scores, *dscores, *slopes;  // [T][kPanel]: keys down, queries across; slopes: of a soft cap, else null
    float* result;                     // [head][kPanel]
    float *dkey, *dvalue;              // head/64 panels of [T][kPanel]
    AttentionScratch(Carver& carver, const HostOps& ops);
  };
  struct HeadScratch {
    float *weight, *tile, *slopes;          // widened block of the embedding; logits tile; of their soft cap
    std::byte *by_token, *by_word, *panel;  // dlogits [slice][block] and [block][slice]; packed embedding
    HeadScratch(Carver& carver, const HostOps& ops);
  };
  // Shared by all pieces of the head.
  struct HeadShared {
    std::byte *columns, *rows;      // x of the slice, packed with tokens as columns and with tokens as rows
    float *maximum, *sum;           // [blocks][slice]
    float *target_logit, *log_sum;  // [slice]
    float* partial;                 // [groups][width/64][slice][kPanel]
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
  void embedding_backward(const EmbeddingBackward& op, HostWorkers& workers) const;
  void attention_piece(const Attention& op, std::size_t index, unsigned slot) const;
  void attention_backward_piece(const AttentionBackward& op, std::size_t index, unsigned slot) const;
  float attention_scale(const AttentionRules& rules) const;
  // What one block of 64 queries sees: keys of [first, end), of which `first` begins a key block.
  struct SeenKeys {
    std::size_t first, end;
    bool masked = false;  // not every query sees all before it
    std::uint32_t lows[kPanel];
  };
  SeenKeys seen_keys(const AttentionRules& rules, std::size_t row, std::size_t first_query) const;
  // scores[keys][64 queries] = key · query, then their softmax.
  SeenKeys probabilities(const AttentionScratch& s, const AttentionRules& rules, std::size_t row,
                         std::size_t first_query, unsigned slot, void* pad) const;
  // Of one head, added to the group's dkey and dvalue.
  void attention_backward_head(const AttentionBackward& op, std::size_t row, std::size_t head, AttentionScratch& s,
                               unsigned slot) const;
  void head(const HeadLoss& op, HostWorkers& workers) const;
  void head_pack(const HeadSlice& slice, HostWorkers& workers) const;
  void head_statistics(const HeadSlice& slice, HostWorkers& workers) const;
  void head_losses(const HeadSlice& slice) const;
  void head_gradients(const HeadSlice& slice, HostWorkers& workers) const;
  void head_block_gradients(const HeadSlice& slice, std::size_t block, float* partial, unsigned slot) const;
  void head_reduce(const HeadSlice& slice, HostWorkers& workers) const;
  void logits(const HeadSlice& slice, const HeadScratch& s, const void* weight, std::size_t words, std::size_t panel,
              unsigned slot, void* pad) const;
  const void* head_weight(const HeadSlice& slice, const HeadScratch& s, std::size_t block) const;

  void prepare_shapes();
  void require_in_hbm(const void* data, std::size_t bytes) const;
  // A tensor of the weight type.
  void require_tensor(const void* data, std::size_t elements) const {
    require_in_hbm(data, elements * element_bytes());
  }
  // The first `columns` of each token, which are `stride` elements apart.
  void require_rows(const void* data, std::size_t stride, std::size_t columns) const {
    require_tensor(data, (shape_.tokens() - 1) * stride + columns);
  }
  // x as a GEMM's left operand: itself, or a copy in fp32.
  const void* operand(const void* x, std::size_t rows, std::size_t columns, HostWorkers& workers) const;
  // The same of rows `stride` elements apart.
  const void* operand(const void* x, std::size_t rows, std::size_t columns, std::size_t stride,
                      HostWorkers& workers) const;
  void pack(const void* x, std::size_t stride, std::size_t depth, std::size_t columns, std::byte* panel) const;
  void pack_transposed(const void* x, std::size_t stride, std::size_t depth, std::size_t columns,
                       std::byte* panel) const;
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
  std::size_t slice_tokens() const { return std::min(kSlice, shape_.tokens()); }

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
