#include "swap/policy/run_stores.h"

#include <algorithm>
#include <cstddef>

#include "kernels/checksum.h"
#include "spillway/rank_directory.h"

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
  // Named stores first: a store that has its name proves that its run was complete.
  const auto consider = [&](const std::optional<RunId> RankStores::*which) {
    for (std::uint32_t rank = 0; rank < ranks.size() && !choice.whole; ++rank) {
      const std::optional<RunId>& run = ranks[rank].*which;
      if (!run) continue;
      const bool whole = std::ranges::all_of(ranks, [&](const RankStores& stores) { return has(stores, *run); });
      // The others are not compared with a run that only waits.
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

namespace {

bool in_its_place(const PlacedStore& store) {
  return store.says.count == 1 ? !store.rank : store.rank == store.says.index;
}

// Those whose stores are all there, and one of them with its name where `named`.
std::vector<PlacedRun> whole_runs(std::span<const PlacedStore> stores, bool named) {
  std::vector<PlacedRun> whole;
  for (const PlacedStore& one : stores) {
    const PlacedRun run{one.run, one.says.count};
    if ((named && one.waiting) || !in_its_place(one) || std::ranges::find(whole, run) != whole.end()) continue;
    std::uint32_t found = 0;
    const auto of_rank = [&](const PlacedStore& store) {
      return in_its_place(store) && PlacedRun{store.run, store.says.count} == run && store.says.index == found;
    };
    while (found < run.ranks && std::ranges::any_of(stores, of_rank)) ++found;
    if (found == run.ranks) whole.push_back(run);
  }
  return whole;
}

// Whether a run goes on with another one's work: as its successor, or as that of a successor of up to 4,096 ranks. An
// id does not say by which number of ranks it came: all are tried.
bool descends_from(const PlacedRun& run, const RunId& old) {
  constexpr std::uint32_t kMostRanks = 4096;
  if (run.run == successor_of(old, run.ranks)) return true;
  for (std::uint32_t between = 1; between <= kMostRanks; ++between) {
    if (run.run == successor_of(successor_of(old, between), run.ranks)) return true;
  }
  return false;
}

}  // namespace

std::vector<PlacedRun> choose_placed_run(std::span<const PlacedStore> stores) {
  std::vector<PlacedRun> runs = whole_runs(stores, true);
  // No run is named and whole: one whose stores all wait for their names goes on.
  if (runs.empty()) runs = whole_runs(stores, false);
  const std::vector<PlacedRun> all = runs;
  // Of a run and the run that continues it the later one is chosen: the old one only waits to be removed.
  std::erase_if(runs, [&](const PlacedRun& old) {
    return std::ranges::any_of(all, [&](const PlacedRun& run) { return run != old && descends_from(run, old.run); });
  });
  return runs;
}

RunId successor_of(const RunId& run, std::uint32_t ranks) {
  RunId successor;
  for (std::uint64_t word = 0; word < std::size(run.word); ++word) {
    const std::uint64_t of[] = {run.word[0], run.word[1], ranks, word};
    successor.word[word] = granule_checksum(std::as_bytes(std::span(of)));
  }
  return successor;
}

std::filesystem::path directory_of_rank(const std::filesystem::path& path, std::uint32_t rank) {
  return path / ("rank" + std::to_string(rank));
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
