#include "src/engine/parameter_updates.h"

#include <algorithm>
#include <optional>

#include "spillway/error.h"

namespace spillway {

ParameterUpdates::ParameterUpdates(const Config& config, const Plan& plan, const ModelDescription& model)
    : config_(config), plan_(plan), model_(model), uneven_(plan.blocks.size()) {
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    first_.push_back(choice_.size());
    choice_.insert(choice_.end(), plan.groups.parameter[b].begin(), plan.groups.parameter[b].end());
  }
  counts_.resize(choice_.size());
  // The groups' scalars first, then room for one of each parameter's own; no step allocates.
  scalars_.resize(plan.groups.values.size() + choice_.size());
}

void ParameterUpdates::resume(std::uint64_t updates, std::span<const std::uint64_t> counts, const std::string& object) {
  // A commit keeps no counts while they are all the same, which is the usual case.
  if (counts.empty()) {
    std::ranges::fill(counts_, updates);
    return;
  }
  const bool right = counts.size() == counts_.size() &&
                     std::ranges::all_of(counts, [updates](std::uint64_t count) { return count <= updates; });
  if (!right) {
    throw Error(Code::kCorrupt, {object, "counts other updates of its parameters than its steps have made", 0,
                                 "go on with the version of Spillway that wrote it"});
  }
  std::ranges::copy(counts, counts_.begin());
}

std::span<const std::uint64_t> ParameterUpdates::counts(std::uint64_t updates) const {
  for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
    const std::vector<Parameter>& parameters = model_.blocks[b].parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (parameters[p].trainable && counts_[first_[b] + p] != updates) return counts_;
    }
  }
  return {};
}

void ParameterUpdates::begin_update(std::uint64_t step, double gradient_scale) {
  begin_update(step, gradient_scale, {});
}

void ParameterUpdates::begin_update(std::uint64_t step, double gradient_scale,
                                    std::span<const OptimizerConfig> groups) {
  step_ = step;
  gradient_scale_ = gradient_scale;
  given_ = groups;
  const std::size_t count = groups.empty() ? plan_.groups.values.size() : groups.size();
  for (std::uint32_t g = 0; g < count; ++g) scalars_[g] = scalars_for(g, step);
}

OptimizerScalars ParameterUpdates::scalars_for(std::uint32_t group, std::uint64_t update) const {
  if (!given_.empty()) return optimizer_scalars(given_[group], update, gradient_scale_);
  return scalars_of(config_, plan_.groups.values[group], {.step = step_, .update = update}, gradient_scale_);
}

// Neighbours of one group and count share their scalars, so that they are one range: parameters that were left out
// together, as those of an expert are.
void ParameterUpdates::take(std::uint32_t block, std::span<const std::uint8_t> brought) {
  const std::vector<std::uint32_t>& groups = plan_.groups.parameter[block];
  std::optional<std::size_t> before;  // the last parameter with scalars of its own
  uneven_[block] = 0;
  for (std::size_t p = 0; p < groups.size(); ++p) {
    if (!model_.blocks[block].parameters[p].trainable) continue;
    const std::size_t at = first_[block] + p;
    const std::uint64_t update = counts_[at] + 1;
    choice_[at] = groups[p];
    // The parameter was in every update so far: the scalars of its group are right.
    if (brought[p] && update == step_) continue;
    uneven_[block] = 1;
    if (!brought[p]) {
      // Left out altogether: no decay either, and its own count does not advance.
      choice_[at] = kNotUpdated;
    } else if (before && groups[*before] == groups[p] && counts_[first_[block] + *before] == counts_[at]) {
      choice_[at] = choice_[first_[block] + *before];
    } else {
      choice_[at] = static_cast<std::uint32_t>(plan_.groups.values.size() + at);
      scalars_[choice_[at]] = scalars_for(groups[p], update);
      before = p;
    }
  }
}

void ParameterUpdates::advance() {
  for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
    const std::vector<Parameter>& parameters = model_.blocks[b].parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      counts_[first_[b] + p] += parameters[p].trainable && choice_[first_[b] + p] != kNotUpdated;
    }
  }
}

std::span<const GroupRange> ParameterUpdates::ranges(std::uint32_t t, std::vector<GroupRange>& room) const {
  const TilePlan& tile = plan_.tiles[t];
  if (!uneven_[tile.block]) return tile.groups;
  const BlockPartition& partition = plan_.blocks[tile.block].partition;
  ranges_of(partition, std::span(choice_).subspan(first_[tile.block], partition.parameters.size()), tile.range, room);
  return room;
}

}  // namespace spillway
