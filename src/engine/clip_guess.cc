#include "src/engine/clip_guess.h"

#include <algorithm>

namespace spillway {

namespace {

// The blocks of a kind, as the plan's visits complete their gradients.
std::vector<std::uint32_t> as_completed(const Plan& plan, bool BlockPlan::*kind) {
  std::vector<std::size_t> last_visit(plan.blocks.size());
  for (std::size_t v = 0; v < plan.visits.size(); ++v) last_visit[plan.visits[v].block] = v;
  std::vector<std::uint32_t> blocks;
  for (std::uint32_t b = 0; b < plan.blocks.size(); ++b) {
    if (plan.blocks[b].*kind) blocks.push_back(b);
  }
  std::ranges::stable_sort(blocks, {}, [&](std::uint32_t b) { return last_visit[b]; });
  return blocks;
}

}  // namespace

std::vector<std::uint32_t> speculated_blocks(const Plan& plan, std::uint32_t count) {
  const std::vector<std::uint32_t> all = as_completed(plan, &BlockPlan::speculative);
  std::vector<std::uint32_t> taken;
  count = std::min(count, static_cast<std::uint32_t>(all.size()));
  for (std::uint64_t i = 0; i < count; ++i) taken.push_back(all[i * all.size() / count]);
  return taken;
}

ClipGuess::ClipGuess(const Plan& plan, std::optional<std::uint32_t> blocks)
    : plan_(plan), chooses_(!blocks && std::ranges::any_of(plan.blocks, &BlockPlan::speculative)) {
  choose(blocks.value_or(0));
  if (plan.early_blocks && !plan.visits.empty()) expected_ = as_completed(plan, &BlockPlan::early);
}

void ClipGuess::choose(std::uint32_t blocks) {
  chosen_.assign(plan_.blocks.size(), 0);
  const std::vector<std::uint32_t> all = speculated_blocks(plan_, blocks);
  for (const std::uint32_t block : all) chosen_[block] = 1;
  blocks_ = static_cast<std::uint32_t>(all.size());
  // Without planned visits nobody knows in which order gradients complete: nothing is read ahead for them.
  if (!plan_.visits.empty()) expected_ = all;
}

bool ClipGuess::take(std::uint32_t block) {
  if (!chosen_[block] || !guesses()) return false;
  ++taken_;
  return true;
}

void ClipGuess::end_step(bool clipped, const std::function<std::optional<std::uint32_t>()>& best) {
  // One step that was clipped ends the guessing until kCalmSteps in a row were not.
  unclipped_ = clipped ? 0 : std::min(unclipped_ + 1, kCalmSteps);
  ++steps_;
  // Twice: a forecast goes by the shortest time that each visit took so far.
  if (chooses_ && (steps_ == 2 || steps_ == 4)) choose(best().value_or(0));
}

}  // namespace spillway
