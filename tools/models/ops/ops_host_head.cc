// Logits, cross entropy and their gradients, holding the logits of a few tokens alone.
//
// Per slice of at most 256 tokens the vocabulary is walked twice in blocks of 128 words:
//
//   1. logits[words][tokens] = wte_block · xᵀ  →  maximum and sum of exponentials per token and block, the target's
//      logit; combined in block order: log-sum-exp and loss of each token
//   2. dlogits = (softmax - onehot) * scale
//                             →  dwte_block += dlogits · x,   dx partial += dlogitsᵀ · wte_block
//
// Between them the slice's logits are kept in fp32, 1 KiB a word, which spares a quarter of the arithmetic. dx sums
// over the vocabulary, so blocks are dealt to at most 16 groups, each with a partial sum of its own, and the partial
// sums are added in order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tools/models/ops/ops_host.h"

namespace spillway::models {

HostOps::HeadScratch::HeadScratch(Carver& carver, const HostOps& ops) {
  const std::size_t tokens = ops.head_tokens(), operand = ops.operand_bytes();
  weight = carver.take<float>(ops.operands_ == ops.shape_.type ? 0 : kVocabBlock * ops.shape_.width);
  tile = carver.take<float>(kVocabBlock * kPanel);
  slopes = carver.take<float>(ops.decoder() ? kVocabBlock * kPanel : 0);
  by_token = carver.take<std::byte>(tokens * kVocabBlock * operand);
  by_word = carver.take<std::byte>(kVocabBlock * tokens * operand);
  panel = carver.take<std::byte>(padded_depth(kVocabBlock) * kPanel * operand);
}

HostOps::HeadShared::HeadShared(Carver& carver, const HostOps& ops) {
  const std::size_t tokens = align_up(ops.head_tokens(), kPanel), operand = ops.operand_bytes();
  const std::size_t width = align_up<std::size_t>(ops.shape_.width, kPanel);
  columns = carver.take<std::byte>(tokens * padded_depth(ops.shape_.width) * operand);
  rows = carver.take<std::byte>(width * padded_depth(tokens) * operand);
  maximum = carver.take<float>(ops.vocab_blocks() * tokens);
  sum = carver.take<float>(ops.vocab_blocks() * tokens);
  target_logit = carver.take<float>(tokens);
  log_sum = carver.take<float>(tokens);
  partial = carver.take<float>(ops.groups() * width * tokens);
  logits = ops.shape_.forward_alone ? nullptr : carver.take<float>(ops.vocab_blocks() * kVocabBlock * tokens);
}

void HostOps::run(const HeadLoss& op, Stream& stream) {
  const std::size_t m = tokens(op.count), width = shape_.width, e = element_bytes();
  require_in_hbm(op.x, m * width * e);
  require_in_hbm(op.targets, m * sizeof(std::uint32_t));
  require_in_hbm(op.losses, m * sizeof(float));
  require_in_hbm(op.token_weight, shape_.vocabulary * width * e);
  if (op.dx != nullptr) require_in_hbm(op.dx, m * width * e);
  if (op.dtoken_weight != nullptr) require_in_hbm(op.dtoken_weight, shape_.vocabulary * width * sizeof(float));
  SPILLWAY_CHECK(op.soft_cap == 0 || decoder(), "a GPT-2 has no soft cap");
  stream.launch([this, op](HostWorkers& workers) { head(op, workers); });
}

void HostOps::head(const HeadLoss& op, HostWorkers& workers) const {
  Carver carver(shared_);
  const HeadShared shared(carver, *this);
  const std::size_t m = tokens(op.count);
  for (std::size_t first = 0; first < m; first += kSlice) {
    const HeadSlice slice{op, shared, first, std::min(kSlice, m - first)};
    head_pack(slice, workers);
    head_statistics(slice, workers);
    head_losses(slice);
    if (op.dx == nullptr) continue;
    head_gradients(slice, workers);
    head_reduce(slice, workers);
  }
}

void HostOps::head_pack(const HeadSlice& slice, HostWorkers& workers) const {
  const std::size_t width = shape_.width;
  const std::size_t token_panels = div_up(slice.count, kPanel), width_panels = div_up(width, kPanel);
  const std::byte* x = at(slice.op.x, slice.first * width);
  // Rows are for the gradients.
  workers.parallel_for(token_panels + (slice.op.dx != nullptr ? width_panels : 0), [&](std::size_t index) {
    if (index < token_panels) {
      const std::size_t first = index * kPanel;
      pack_transposed(at(x, first * width), width, width, std::min(kPanel, slice.count - first),
                      slice.shared.columns + first * padded_depth(width) * operand_bytes());
    } else {
      const std::size_t first = (index - token_panels) * kPanel;
      pack(at(x, first), width, slice.count, std::min(kPanel, width - first),
           slice.shared.rows + first * padded_depth(slice.count) * operand_bytes());
    }
  });
}

// The rows of a vocabulary block as GEMM operand.
const void* HostOps::head_weight(const HeadSlice& slice, const HeadScratch& s, std::size_t block) const {
  const std::size_t first = block * kVocabBlock, words = std::min(kVocabBlock, shape_.vocabulary - first);
  const std::byte* rows = at(slice.op.token_weight, first * shape_.width);
  if (operands_ == shape_.type) return rows;
  kernels_.widen(rows, s.weight, words * shape_.width);
  return s.weight;
}

// Where the logits of a block and of 64 tokens lie, [words][64].
float* HostOps::head_tile(const HeadSlice& slice, const HeadScratch& s, std::size_t block, std::size_t token) const {
  if (slice.shared.logits == nullptr) return s.tile;
  return slice.shared.logits + kVocabBlock * (block * align_up(head_tokens(), kPanel) + token);
}

void HostOps::head_statistics(const HeadSlice& slice, HostWorkers& workers) const {
  const std::size_t stride = align_up(head_tokens(), kPanel), width = shape_.width;
  workers.parallel_for(vocab_blocks(), [&](std::size_t block) {
    const unsigned slot = workers.current_slot();
    Carver carver = slot_carver(slot);
    const HeadScratch s(carver, *this);
    const std::size_t word = block * kVocabBlock, words = std::min(kVocabBlock, shape_.vocabulary - word);
    const void* weight = head_weight(slice, s, block);
    for (std::size_t first = 0; first < slice.count; first += kPanel) {
      float* const tile = head_tile(slice, s, block, first);
      gemm_.run({words, width, operands_, false}, slot, weight,
                slice.shared.columns + first * padded_depth(width) * operand_bytes(), tile, pad_of(slot));
      if (slice.op.soft_cap != 0) fp32_.soft_cap(tile, words, 1.0f, slice.op.soft_cap, nullptr);
      fp32_.column_statistics(tile, words, slice.shared.maximum + block * stride + first,
                              slice.shared.sum + block * stride + first);
      for (std::size_t c = 0; c < std::min(kPanel, slice.count - first); ++c) {
        const std::size_t target = slice.op.targets[slice.first + first + c];
        if (target - word < words) slice.shared.target_logit[first + c] = tile[(target - word) * kPanel + c];
      }
    }
  });
}

// A few thousand numbers per token: serial, in double.
void HostOps::head_losses(const HeadSlice& slice) const {
  const std::size_t stride = align_up(head_tokens(), kPanel);
  for (std::size_t token = 0; token < align_up(slice.count, kPanel); ++token) {
    float maximum = slice.shared.maximum[token];
    for (std::size_t b = 1; b < vocab_blocks(); ++b) {
      maximum = std::max(maximum, slice.shared.maximum[b * stride + token]);
    }
    double sum = 0;
    for (std::size_t b = 0; b < vocab_blocks(); ++b) {
      const std::size_t at_block = b * stride + token;
      sum += slice.shared.sum[at_block] * std::exp(static_cast<double>(slice.shared.maximum[at_block]) - maximum);
    }
    const double log_sum = maximum + std::log(sum);
    slice.shared.log_sum[token] = static_cast<float>(log_sum);
    if (token >= slice.count) continue;
    const bool learns = slice.op.targets[slice.first + token] != kNoTarget;
    slice.op.losses[slice.first + token] =
        learns ? static_cast<float>(log_sum - slice.shared.target_logit[token]) : 0.0f;
  }
}

void HostOps::head_gradients(const HeadSlice& slice, HostWorkers& workers) const {
  const std::size_t per_group = align_up<std::size_t>(shape_.width, kPanel) * align_up(head_tokens(), kPanel);
  workers.parallel_for(groups(), [&](std::size_t group) {
    float* partial = slice.shared.partial + group * per_group;
    std::fill(partial, partial + per_group, 0.0f);
    const std::size_t end = vocab_blocks() * (group + 1) / groups();
    for (std::size_t block = vocab_blocks() * group / groups(); block < end; ++block) {
      head_block_gradients(slice, block, partial, workers.current_slot());
    }
  });
}

// dlogits of a block of words, as rows of words and as rows of tokens.
void HostOps::head_dlogits(const HeadSlice& slice, const HeadScratch& s, std::size_t block, std::size_t words) const {
  const HeadLoss& op = slice.op;
  for (std::size_t first = 0; first < slice.count; first += kPanel) {
    const std::size_t tokens = std::min(kPanel, slice.count - first);
    float* const tile = head_tile(slice, s, block, first);
    if (op.soft_cap != 0) fp32_.soft_cap_slopes(tile, words, op.soft_cap, s.slopes);
    fp32_.column_probabilities(tile, words, slice.shared.log_sum + first, op.scale);
    for (std::size_t c = 0; c < tokens; ++c) {
      const std::size_t target = op.targets[slice.first + first + c], word = block * kVocabBlock;
      if (target - word < words) tile[(target - word) * kPanel + c] -= op.scale;
      for (std::size_t r = 0; r < words && target == kNoTarget; ++r) tile[r * kPanel + c] = 0;
    }
    if (op.soft_cap != 0) fp32_.scale_tile(tile, s.slopes, words, 1.0f);
    operand_kernels_.store_tile(tile, words, tokens, nullptr, nullptr, s.by_word + first * operand_bytes(),
                                slice.count);
    operand_kernels_.store_transposed(tile, words, tokens, s.by_token + first * words * operand_bytes(), words);
  }
}

void HostOps::head_block_gradients(const HeadSlice& slice, std::size_t block, float* partial, unsigned slot) const {
  Carver carver = slot_carver(slot);
  const HeadScratch s(carver, *this);
  void* pad = pad_of(slot);
  const HeadLoss& op = slice.op;
  const std::size_t width = shape_.width, stride = align_up(head_tokens(), kPanel);
  const std::size_t word = block * kVocabBlock, words = std::min(kVocabBlock, shape_.vocabulary - word);
  head_dlogits(slice, s, block, words);
  for (std::size_t column = 0; column < width; column += kPanel) {
    const std::size_t columns = std::min(kPanel, width - column);
    if (op.dtoken_weight != nullptr) {
      gemm_.run({words, slice.count, operands_, false}, slot, s.by_word,
                slice.shared.rows + column * padded_depth(slice.count) * operand_bytes(), s.tile, pad);
      store_gradient(s.tile, words, columns, DType::kFloat32, op.accumulate || slice.first > 0, op.dtoken_weight,
                     word * width + column, width);
    }
    pack(at(op.token_weight, word * width + column), width, words, columns, s.panel);
    gemm_.run({slice.count, words, operands_, true}, slot, s.by_token, s.panel, partial + column * stride, pad);
  }
}

void HostOps::head_reduce(const HeadSlice& slice, HostWorkers& workers) const {
  const std::size_t width = shape_.width, stride = align_up(head_tokens(), kPanel);
  const std::size_t per_group = align_up(width, kPanel) * stride;
  workers.parallel_for(div_up(width, kPanel), [&](std::size_t index) {
    const std::size_t column = index * kPanel;
    float* sum = slice.shared.partial + column * stride;
    for (std::size_t g = 1; g < groups(); ++g) fp32_.accumulate(sum + g * per_group, sum, slice.count * kPanel);
    kernels_.store_tile(sum, slice.count, std::min(kPanel, width - column), nullptr, nullptr,
                        at(slice.op.dx, slice.first * width + column), width);
  });
}

}  // namespace spillway::models
