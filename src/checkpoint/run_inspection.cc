#include "src/checkpoint/run_inspection.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "swap/store_check.h"

namespace spillway {
namespace {

std::string text_of(const RunId& run) { return fmt::format("{:016x}{:016x}", run.word[0], run.word[1]); }

std::optional<Superblock> read_superblock(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return std::nullopt;
  return StoreFiles::superblock_of(File::open(file, {.direct = false}));
}

bool same_run(const Superblock& one, const Superblock& other) { return std::ranges::equal(one.run_id, other.run_id); }

// How many ranks the run has, by the lowest store that has its name; by one that waits for its name where another
// rank's has it, or none has.
std::optional<std::uint32_t> count_ranks(const std::filesystem::path& path, const std::set<std::uint32_t>& ranks) {
  const auto lowest = directory_of_rank(path, *ranks.begin());
  std::optional<Superblock> waiting, first;
  try {
    waiting = read_superblock(StoreFiles::temporary_name(lowest));
  } catch (const Error&) {  // not a whole one
  }
  for (const std::uint32_t rank : ranks) {
    const auto named = read_superblock(directory_of_rank(path, rank) / kStoreFileName);
    if (named && waiting && same_run(*waiting, *named)) return named->ranks;
    if (!first) first = named;
  }
  if (!first) first = waiting;
  if (!first) return std::nullopt;
  return first->ranks;
}

std::string ranks_text(const std::vector<std::uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

[[noreturn]] void refuse_both(const StoreDirectories& paths, std::uint32_t ranks) {
  throw Error(
      Code::kInvalidArgument,
      {paths.front().string(), fmt::format("holds a store, and below it are those of {} ranks, rank0 and so on", ranks),
       0, "move one of the two to a directory of its own"});
}

// Of all that are refused, in one message.
[[noreturn]] void refuse_run(const RunChoice& choice, std::span<const RankStores> stores, const RunPaths& paths) {
  std::vector<std::uint32_t> missing, other;
  for (std::uint32_t rank = 0; rank < stores.size(); ++rank) {
    if (choice.of[rank] == StoreChoice::kMissing) missing.push_back(rank);
    if (choice.of[rank] == StoreChoice::kOtherRun) other.push_back(rank);
  }
  const std::string hint = "bring the stores of all ranks of one run below one directory, as rank0 and so on";
  if (!missing.empty()) {
    throw Error(Code::kNotFound, {paths[missing[0]].front().string(),
                                  fmt::format("holds no store: {} of {} {} none", ranks_text(missing), stores.size(),
                                              missing.size() == 1 ? "has" : "have"),
                                  0, hint});
  }
  throw Error(
      Code::kInvalidArgument,
      {(paths[other[0]].front() / kStoreFileName).string(),
       fmt::format("is of run {}; {} not of the run of rank {}, {}", text_of(*stores[other[0]].named),
                   ranks_text(other) + (other.size() == 1 ? " is" : " are"), choice.first, text_of(*choice.run)),
       0, hint});
}

}  // namespace

void refuse_several(const StoreDirectories& paths, std::span<const PlacedRun> runs) {
  for (const PlacedRun& run : runs) {
    if (run.ranks > 1 && std::ranges::find(runs, 1u, &PlacedRun::ranks) != runs.end()) refuse_both(paths, run.ranks);
  }
  throw Error(
      Code::kInvalidArgument,
      {paths.front().string(),
       fmt::format("holds the stores of several runs, {} of {} ranks and {} of {}, and neither goes on with the "
                   "other's work",
                   text_of(runs[0].run), runs[0].ranks, text_of(runs[1].run), runs[1].ranks),
       0,
       fmt::format("move those of one, rank0 to rank{} or rank0 to rank{}, to a directory of their own, and "
                   "see what the other is with spillway store",
                   runs[0].ranks - 1, runs[1].ranks - 1)});
}

Error refused_store(const RunChoice& choice, std::span<const RankStores> ranks, std::uint32_t rank,
                    const std::filesystem::path& path) {
  if (!choice.run) return Error(Code::kNotFound, path.string(), "holds no store", 0, Remedy::kCheckPathOrBegin);
  if (choice.of[rank] == StoreChoice::kMissing) {
    return Error(Code::kNotFound, path.string(),
                 fmt::format("holds no store of rank {}, and rank {} has one", rank, choice.first), 0,
                 Remedy::kCheckPathOrBegin);
  }
  return Error(Code::kInvalidArgument, (path / kStoreFileName).string(),
               fmt::format("is of run {}, and that of rank {} of run {}", text_of(*ranks[rank].named), choice.first,
                           text_of(*choice.run)),
               0, Remedy::kOtherPathOrReplace);
}

Error no_common_step(const std::filesystem::path& path, std::span<const RankCommits> ranks) {
  return Error(Code::kCorrupt, path.string(), "the ranks' stores have no step in common: " + steps_text(ranks), 0,
               Remedy::kRestoreOrReplace);
}

OpenRun::OpenRun(const RunPaths& paths, FoundStores::Purpose purpose) {
  if (paths.empty())
    throw Error(Code::kInvalidArgument, {"run", "no store is named", 0, "name the paths of each rank's"});
  std::vector<std::unique_ptr<FoundStores>> found;
  std::vector<RankStores> stores;
  for (const auto& of_rank : paths) {
    found.push_back(std::make_unique<FoundStores>(of_rank, purpose));
    stores.push_back(found.back()->runs());
  }
  choice = choose_run(stores);
  if (!choice.whole) refuse_run(choice, stores, paths);
  for (std::uint32_t rank = 0; rank < paths.size(); ++rank) {
    StoreFiles& files = choice.of[rank] == StoreChoice::kNamed ? *found[rank]->named : *found[rank]->waiting;
    const Superblock& block = files.superblock();
    if (block.rank != rank || block.ranks != paths.size()) {
      throw Error(Code::kInvalidArgument, {files.files().front().path().string(),
                                           fmt::format("is the store of rank {} of {}, in the place of rank {} of {}",
                                                       block.rank, block.ranks, rank, paths.size()),
                                           0, "name the stores of all ranks, in their order"});
    }
    ranks.push_back(std::make_unique<OpenStore>(std::move(files), paths[rank]));
  }
}

std::vector<RankCommits> OpenRun::commits() const {
  std::vector<RankCommits> all;
  for (const auto& store : ranks) all.push_back(TileStore::commits_of(store->choice));
  return all;
}

const Manifest& OpenRun::record_of(std::size_t rank, const Commit& commit) const {
  const ManifestChoice& records = ranks[rank]->choice;
  return records.manifest->sequence == commit.sequence ? *records.manifest : *records.older;
}

std::unique_ptr<OpenRun> open_when_free(const RunPaths& paths) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(TileStore::kLockPatienceSeconds);
  while (true) {
    auto run = std::make_unique<OpenRun>(paths, FoundStores::Purpose::kInspect);
    const auto busy = std::ranges::find_if(run->ranks, [](const auto& store) { return store->files.in_use(); });
    if (busy == run->ranks.end()) return run;
    if (Clock::now() >= deadline) {
      throw Error(Code::kBusy,
                  {(*busy)->object(), "is in use by another engine or process", 0, "wait for it to end, or stop it"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

RunPaths find_ranks(const std::vector<std::filesystem::path>& paths) {
  if (paths.empty()) return {};
  const std::vector<PlacedStore> around = find_stores(paths);
  const std::vector<PlacedRun> runs = choose_placed_run(around);
  if (runs.size() > 1) refuse_several(paths, runs);
  if (!runs.empty()) {
    const PlacedRun& run = runs.front();
    // A whole run of one rank that was not chosen is an older one, whose work this one goes on with.
    const auto beside = [&](const PlacedStore& store) {
      return run.ranks > 1 && !store.rank && !store.waiting && store.says.count > 1;
    };
    if (std::ranges::any_of(around, beside)) refuse_both(paths, run.ranks);
    return run.ranks == 1 ? RunPaths() : paths_of_run(paths, run.ranks);
  }
  const std::set<std::uint32_t> there = ranks_below(paths.front());
  const auto count = there.empty() ? std::nullopt : count_ranks(paths.front(), there);
  if (!count) return {};
  if (TileStore::exists(paths)) refuse_both(paths, *count);
  return paths_of_run(paths, *count);
}

RunInfo inspect_run(const RunPaths& paths) {
  const OpenRun run(paths, FoundStores::Purpose::kInspect);
  RunInfo info;
  bool keeps_steps = true;
  for (std::uint32_t rank = 0; rank < run.ranks.size(); ++rank) {
    info.ranks.push_back(info_of(*run.ranks[rank]));
    keeps_steps &= info.ranks.back().slots >= 2;
    if (run.choice.of[rank] == StoreChoice::kWaiting) info.unnamed.push_back(rank);
  }
  const std::filesystem::path first = paths[0].front();
  const std::filesystem::path above = first.parent_path();
  for (const std::uint32_t rank : ranks_below(first.filename() == "rank0" ? above : std::filesystem::path())) {
    if (rank >= paths.size()) info.others.push_back(directory_of_rank(above, rank));
  }
  if (!keeps_steps) return info;  // what records name is overwritten by every step
  const std::vector<RankCommits> commits = run.commits();
  info.steps = steps_text(commits);
  if (const auto common = newest_common(commits)) info.step = common->step;
  return info;
}

CheckedStore verify_run(const RunPaths& paths, const CheckOptions& options) {
  const OpenRun run(paths, FoundStores::Purpose::kInspect);
  std::uint64_t all = 0, before = 0;
  for (const auto& store : run.ranks) {
    refuse_to_verify(*store);
    all += step_bytes(store->layout);
  }
  const auto common = newest_common(run.commits());
  if (!common) throw no_common_step(paths[0].front(), run.commits());
  CheckedStore checked;
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    CheckOptions of_rank = options;
    if (options.progress)
      of_rank.progress = [&](std::uint64_t done, std::uint64_t) { options.progress(before + done, all); };
    const CheckedStore one = verify_step(*run.ranks[rank], run.record_of(rank, *common), of_rank);
    before += step_bytes(run.ranks[rank]->layout);
    checked.step = one.step;
    checked.bytes += one.bytes;
    checked.bad_extents += one.bad_extents;
  }
  return checked;
}

// Everything is verified before the first of them is changed.
std::uint64_t roll_back_run(const RunPaths& paths, const CheckOptions& options) {
  OpenRun run(paths, FoundStores::Purpose::kUse);
  for (const auto& store : run.ranks) TileStore::refuse_one_slot(store->files);
  const auto choice = choose_roll_back(run.commits());
  if (!choice) {
    throw Error(Code::kCorrupt, paths[0].front().string(),
                "the ranks' stores hold no other step in common to go back to: " + steps_text(run.commits()), 0,
                Remedy::kRestoreOrReplace);
  }
  std::uint64_t all = 0, before = 0;
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    if (choice->of[rank] != RollBack::kStays) all += step_bytes(run.ranks[rank]->layout);
  }
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    if (choice->of[rank] == RollBack::kStays) continue;
    OpenStore& store = *run.ranks[rank];
    TileStore::check_older(store.files, store.layout, *store.choice.older, store.shape(),
                           [&](std::uint64_t done, std::uint64_t) {
                             if (options.progress) options.progress(before + done, all);
                           });
    before += step_bytes(store.layout);
  }
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    OpenStore& store = *run.ranks[rank];
    store.files.repair();
    if (choice->of[rank] == RollBack::kTakesOlder)
      TileStore::take_older(store.files, store.layout, store.choice, kRollBackStride);
    if (choice->of[rank] == RollBack::kForgetsNewer)
      TileStore::forget_newest(store.files, store.layout, *store.choice.manifest);
  }
  return choice->step;
}

}  // namespace spillway
