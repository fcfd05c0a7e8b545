// The loss of rows that nothing is learned of: the forward part of a step, over and over.
#include "spillway/error.h"
#include "tools/models/stream_end.h"
#include "tools/models/trainer.h"

namespace spillway::models {

// A head that is tied to the embedding is visited together with the embedding of the pass that follows, so that its
// weights come once for both.
//
//   embedding | layers | head of this pass, embedding of the next | layers | … | head
double Trainer::evaluate(const NextRows& next) {
  const auto layers = static_cast<std::uint32_t>(model_.layers.size());
  double sum = 0;
  std::uint64_t targets = 0;
  const StreamEnd settled(*stream_);
  const AdaptersEnd end{adapters_};
  std::optional<StepRows> rows = next();
  if (rows) {
    bring(*rows);
    embed();
  }
  while (rows) {
    for (std::uint32_t l = 0; l < layers; ++l) forward(l);
    // A forward visit: a backward one would have the engine finish the update of the step before.
    Lease lease = engine_->acquire(model_.head_block, Pass::kForward, *stream_);
    evaluate_head(lease);
    targets += rows->target_count;
    sum = add_losses(sum);
    if (!tied()) lease.release();
    rows = next();
    if (!rows) continue;
    bring(*rows);
    embed();
  }
  engine_->discard_step();  // its time and traffic are none of the next step's
  return sum / static_cast<double>(targets);
}

// Uses come in the step's order, in which the head goes backward.
void Trainer::evaluate_head(const Lease& lease) const {
  const Workspace& w = *work_;
  float* const losses = w.losses + first_micro_batch() * shape_.tokens();
  const auto last = static_cast<std::uint32_t>(model_.layers.size());
  for (const Slice& slice : slices_) {
    const ActivationLease x = input(last, slice, Access::kUpdate);
    layer_forward_.norm(model_.final_norm, lease, x.data(), w.normed, w.normed_statistics, slice.count);
    ops_->run(HeadLoss{.x = w.normed,
                       .targets = w.targets + token(slice),
                       .token_weight = lease.weight(model_.head_weight),
                       .scale = 0,
                       .losses = losses + token(slice),
                       .dx = nullptr,
                       .dtoken_weight = nullptr,
                       .accumulate = false,
                       .soft_cap = model_.head_soft_cap,
                       .count = slice.count},
              *stream_);
  }
}

}  // namespace spillway::models
