#include "src/engine/rank_stores.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "src/checkpoint/run_inspection.h"
#include "swap/policy/run_stores.h"

namespace spillway {
namespace {

using Purpose = FoundStores::Purpose;

// Of every rank what it may have, by rank.
template <class Value, class Words>
std::vector<std::optional<Value>> gather_some(Agreement& agreement, const std::optional<Value>& own, Words words) {
  const std::vector<std::uint64_t> there = agreement.gather(own ? 1 : 0);
  Value value = own.value_or(Value{});
  const auto [first, second] = words(value);
  const std::vector<std::uint64_t> firsts = agreement.gather(*first), seconds = agreement.gather(*second);
  std::vector<std::optional<Value>> all(there.size());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    *first = firsts[rank];
    *second = seconds[rank];
    if (there[rank] != 0) all[rank] = value;
  }
  return all;
}

std::vector<RankStores> gather_stores(Agreement& agreement, const RankStores& own) {
  const auto words = [](RunId& run) { return std::pair(&run.word[0], &run.word[1]); };
  const auto named = gather_some(agreement, own.named, words), waiting = gather_some(agreement, own.waiting, words);
  std::vector<RankStores> all;
  for (std::size_t rank = 0; rank < named.size(); ++rank) all.push_back({named[rank], waiting[rank]});
  return all;
}

std::vector<RankCommits> gather_commits(Agreement& agreement, const RankCommits& own) {
  const auto words = [](Commit& commit) { return std::pair(&commit.sequence, &commit.step); };
  const auto last = gather_some(agreement, own.last, words), before = gather_some(agreement, own.before, words);
  std::vector<RankCommits> all;
  for (std::size_t rank = 0; rank < last.size(); ++rank) all.push_back({last[rank], before[rank]});
  return all;
}

// Rank 0's, on all.
RunId agree_on_run(Agreement& agreement) {
  RunId run = agreement.all([&] { return agreement.rank().index == 0 ? StoreFiles::new_run() : RunId{}; });
  agreement.fold(std::span(run.word), Fold::kOr);
  return run;
}

// What was replaced in part is so in whole before anything else is done: a new store takes the place of one that waits,
// without which the ranks whose store has its name already would be left alone.
void finish_replacement(const StorePaths& paths, Agreement& agreement) {
  FoundStores found = agreement.all([&] { return FoundStores(paths, Purpose::kReplace); });
  const RunChoice choice = choose_run(gather_stores(agreement, found.runs()));
  if (!choice.whole) return;
  agreement.all([&] {
    if (choice.of[agreement.rank().index] == StoreChoice::kWaiting) found.waiting->repair();
  });
}

}  // namespace

std::unique_ptr<TileStore> open_together(const StorePaths& paths, const StoreShape& shape, Agreement& agreement) {
  const std::uint32_t own = agreement.rank().index;
  FoundStores found = agreement.all([&] { return FoundStores(paths, Purpose::kUse); });
  const std::vector<RankStores> stores = gather_stores(agreement, found.runs());
  const RunChoice choice = choose_run(stores);
  const auto goes_on = [&](std::uint64_t, std::uint64_t) { agreement.note_work(); };  // reading all that one has
  std::unique_ptr<TileStore> store = agreement.all([&] {
    const bool named = choice.of[own] == StoreChoice::kNamed;
    if (!named && choice.of[own] != StoreChoice::kWaiting)
      throw refused_store(choice, stores, own, paths.directories.front());
    return TileStore::found(std::move(named ? *found.named : *found.waiting), shape, goes_on);
  });
  const std::vector<RankCommits> commits = gather_commits(agreement, store->commits());
  const std::optional<Commit> common = newest_common(commits);
  // A rank that was killed between its commit and the others' is one step ahead.
  const bool goes_back = store->commits().last != common;
  agreement.all([&] {
    if (!common) throw no_common_step(paths.directories.front(), commits);
    if (goes_back) store->check_before(shape, goes_on);
  });
  if (choice.of[own] == StoreChoice::kNamed) found.waiting.reset();  // unlocked, for begin() to remove
  // Nobody writes a slot before all have gone back.
  agreement.all([&] { store->begin(shape, goes_back); });
  return store;
}

std::unique_ptr<TileStore> create_together(const StorePaths& paths, const StoreShape& shape,
                                           TileStore::Existing existing, const std::function<StorePaths()>& place,
                                           const std::function<void()>& before_loss, Agreement& agreement,
                                           const std::optional<RunId>& wanted) {
  if (existing == TileStore::Existing::kMakesRoom) finish_replacement(paths, agreement);
  if (existing == TileStore::Existing::kNone) agreement.all([&] { TileStore::refuse_existing(paths); });
  // Every rank takes its space first: one that has none ends the attempt before any store is touched.
  auto store = agreement.all([&] { return TileStore::reserve_new(place(), shape, existing); });
  std::uint64_t takes_over[] = {store->takes_over()};
  agreement.fold(std::span(takes_over), Fold::kMax);
  agreement.all([&] {
    if (takes_over[0] != 0 && before_loss) before_loss();
  });
  const RunId run = wanted ? *wanted : agree_on_run(agreement);
  agreement.all([&] { store->make(shape, run); });
  return store;
}

std::unique_ptr<TileStore> create_beside(const StoreShape& shape, const RunId& run,
                                         const std::function<StorePaths()>& place, Agreement& agreement) {
  auto store = agreement.all([&] { return TileStore::reserve_beside(place(), shape); });
  agreement.all([&] { store->make(shape, run); });
  return store;
}

}  // namespace spillway
