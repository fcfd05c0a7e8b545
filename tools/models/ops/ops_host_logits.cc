// The logits of a few tokens. A panel is 64 rows of the table, transposed as they are packed, as in a product of
// torch.nn.Linear: for so few tokens that is what reading the table takes.
#include <algorithm>

#include "tools/models/ops/ops_host.h"

namespace spillway::models {

void HostOps::run(const Logits& op, Stream& stream) {
  const std::size_t m = op.count, width = shape_.width, words = shape_.vocabulary;
  SPILLWAY_CHECK(shape_.forward_alone, "products of any number of tokens are prepared");
  SPILLWAY_CHECK(m > 0 && m <= shape_.slice_tokens(), "logits are of a few tokens");
  SPILLWAY_CHECK(op.soft_cap == 0 || decoder(), "a GPT-2 has no soft cap");
  require_tensor(op.x, m * width);
  require_tensor(op.token_weight, words * width);
  require_in_hbm(op.logits, m * words * sizeof(float));
  stream.launch([this, op](HostWorkers& workers) { few_logits(op, workers); });
}

void HostOps::few_logits(const Logits& op, HostWorkers& workers) const {
  const std::size_t m = op.count, width = shape_.width, words = shape_.vocabulary;
  const auto* x = static_cast<const std::byte*>(operand(op.x, m, width, workers));
  for_pieces(workers, words, kPanel, [&](std::size_t word, std::size_t count) {
    const unsigned slot = workers.current_slot();
    Carver carver = slot_carver(slot);
    const LinearScratch s(carver, *this);
    pack_transposed(at(op.token_weight, word * width), width, width, count, s.panel);
    for (std::size_t row = 0, rows = 0; row < m; row += rows) {
      rows = token_block(m - row);
      gemm_.run({rows, width, operands_, false}, slot, x + row * width * operand_bytes(), s.panel, s.tile,
                pad_of(slot));
      if (op.soft_cap != 0) fp32_.soft_cap(s.tile, rows, 1.0f, op.soft_cap, nullptr);
      fp32_.store_tile(s.tile, rows, count, nullptr, nullptr, op.logits + row * words + word, words);
    }
  });
}

}  // namespace spillway::models
