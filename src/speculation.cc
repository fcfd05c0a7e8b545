#include "src/speculation.h"

#include <algorithm>

namespace spillway {

void speculate(Plan& plan, std::uint32_t count) {
  std::vector<std::size_t> last_visit(plan.blocks.size());
  std::vector<std::uint32_t> order;
  for (std::uint32_t b = 0; b < plan.blocks.size(); ++b) {
    if (plan.blocks[b].speculative) order.push_back(b);
  }
  for (std::size_t v = 0; v < plan.visits.size(); ++v) last_visit[plan.visits[v].block] = v;
  std::ranges::sort(order, {}, [&](std::uint32_t b) { return last_visit[b]; });
  for (std::size_t i = 0; i < std::min<std::size_t>(count, order.size()); ++i) plan.blocks[order[i]].early = true;
}

Speculation::Speculation(const Plan& plan, std::optional<std::uint32_t> blocks)
    : plan_(plan),
      chooses_(!blocks && std::ranges::any_of(plan.blocks, &BlockPlan::speculative)),
      blocks_(blocks.value_or(0)) {}

bool Speculation::take(std::uint32_t block) {
  if (!plan_.blocks[block].speculative || !guesses() || taken_ >= blocks_) return false;
  ++taken_;
  return true;
}

void Speculation::end_step(bool clipped, const std::function<std::optional<std::uint32_t>()>& best) {
  unclipped_ = clipped ? 0 : std::min(unclipped_ + 1, kCalmSteps);
  ++steps_;
  // Twice: a forecast goes by the shortest time that each visit took so far.
  if (chooses_ && (steps_ == 2 || steps_ == 4)) blocks_ = best().value_or(0);
}

}  // namespace spillway
