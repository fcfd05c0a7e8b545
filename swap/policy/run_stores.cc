#include "swap/policy/run_stores.h"

#include <algorithm>

namespace spillway {
namespace {

bool has(const RankStores& stores, const RunId& run) { return stores.named == run || stores.waiting == run; }

bool has(const RankCommits& commits, const Commit& commit) {
  return commits.last == commit || commits.before == commit;
}

std::string have_text(const RankCommits& commits) {
  if (!commits.last) return "no step";
  const std::string last = std::to_string(commits.last->step);
  return commits.before ? "steps " + last + " and " + std::to_string(commits.before->step) : "step " + last;
}

}  // namespace

RunChoice choose_run(std::span<const RankStores> ranks) {
  RunChoice choice;
  choice.of.assign(ranks.size(), StoreChoice::kMissing);
  const auto consider = [&](const std::optional<RunId> RankStores::*which) {
    for (std::uint32_t rank = 0; rank < ranks.size() && !choice.whole; ++rank) {
      const std::optional<RunId>& run = ranks[rank].*which;
      if (!run) continue;
      const bool whole = std::ranges::all_of(ranks, [&](const RankStores& stores) { return has(stores, *run); });
      // One that only waits is nothing that the others are compared with.
      if (!whole && (choice.run || which == &RankStores::waiting)) continue;
      choice.run = run;
      choice.first = rank;
      choice.whole = whole;
    }
  };
  consider(&RankStores::named);
  consider(&RankStores::waiting);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankStores& stores = ranks[rank];
    if (choice.run && stores.named == choice.run) {
      choice.of[rank] = StoreChoice::kNamed;
    } else if (choice.whole) {
      choice.of[rank] = StoreChoice::kWaiting;
    } else if (stores.named) {
      choice.of[rank] = StoreChoice::kOtherRun;
    }
  }
  return choice;
}

std::optional<Commit> newest_common(std::span<const RankCommits> ranks) {
  std::optional<Commit> newest;
  if (ranks.empty()) return newest;
  for (const std::optional<Commit>& commit : {ranks[0].last, ranks[0].before}) {
    if (!commit || (newest && newest->sequence >= commit->sequence)) continue;
    if (std::ranges::all_of(ranks, [&](const RankCommits& other) { return has(other, *commit); })) newest = commit;
  }
  return newest;
}

std::optional<RollBackChoice> choose_roll_back(std::span<const RankCommits> ranks) {
  const std::optional<Commit> common = newest_common(ranks);
  if (!common) return std::nullopt;
  RollBackChoice choice;
  choice.of.assign(ranks.size(), RollBack::kStays);
  const auto is_ahead = [&](const RankCommits& rank) { return rank.last != common; };
  const bool some_ahead = std::ranges::any_of(ranks, is_ahead), all_ahead = std::ranges::all_of(ranks, is_ahead);
  std::optional<std::uint64_t> older;  // the step of the record that takes over, the same on all ranks
  bool goes_back = true;
  for (const RankCommits& rank : ranks) {
    const std::optional<Commit>& to = is_ahead(rank) ? rank.last : rank.before;
    goes_back &= to && (!older || older == to->step);
    goes_back &= !is_ahead(rank) || to->sequence == common->sequence + kRollBackStride;
    if (to) older = to->step;
  }
  if (goes_back && !all_ahead) {
    choice.step = *older;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!is_ahead(ranks[rank])) choice.of[rank] = RollBack::kTakesOlder;
    }
    return choice;
  }
  if (!some_ahead) return std::nullopt;
  choice.step = common->step;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (is_ahead(ranks[rank])) choice.of[rank] = RollBack::kForgetsNewer;
  }
  return choice;
}

std::string steps_text(std::span<const RankCommits> ranks) {
  std::string text;
  for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
    const std::string have = have_text(ranks[first]);
    while (end < ranks.size() && have_text(ranks[end]) == have) ++end;
    if (!text.empty()) text += ", ";
    text += end - first == 1 ? "rank " + std::to_string(first) + " has "
                             : "ranks " + std::to_string(first) + " to " + std::to_string(end - 1) + " have ";
    text += have;
  }
  return text;
}

}  // namespace spillway
