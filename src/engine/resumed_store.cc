#include "src/engine/resumed_store.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "src/checkpoint/run_inspection.h"
#include "src/checkpoint/store_inspection.h"
#include "src/comm/host_share.h"
#include "src/engine/rank_stores.h"
#include "src/engine/store_place.h"

namespace spillway {
namespace {

// A store that was found, as numbers.
using FoundWords = std::array<std::uint64_t, 6>;
constexpr std::uint64_t kNoRank = UINT64_MAX;

FoundWords words_of(const PlacedStore& store) {
  return {store.rank ? *store.rank : kNoRank,
          store.waiting,
          store.run.word[0],
          store.run.word[1],
          store.says.index,
          store.says.count};
}

PlacedStore store_in(const FoundWords& words) {
  PlacedStore store{.rank = {}, .waiting = words[1] != 0, .run = {{words[2], words[3]}}, .says = {}};
  if (words[0] != kNoRank) store.rank = static_cast<std::uint32_t>(words[0]);
  store.says = {static_cast<std::uint32_t>(words[4]), static_cast<std::uint32_t>(words[5])};
  return store;
}

// What any rank sees, on every rank: each may have its own drives.
std::vector<PlacedStore> find_stores_on_all_ranks(const StoreDirectories& run, Agreement& agreement) {
  const std::vector<PlacedStore> own = agreement.all([&] { return find_stores(run); });
  if (agreement.alone()) return own;
  std::vector<PlacedStore> all;
  const std::vector<std::uint64_t> counts = agreement.gather(own.size());
  for (std::uint32_t rank = 0; rank < counts.size(); ++rank) {
    std::vector<FoundWords> words(counts[rank]);
    if (rank == agreement.rank().index) std::ranges::transform(own, words.begin(), words_of);
    if (!words.empty()) agreement.broadcast(std::as_writable_bytes(std::span(words)), rank);
    for (const FoundWords& of : words) {
      const PlacedStore store = store_in(of);
      if (std::ranges::find(all, store) == all.end()) all.push_back(store);
    }
  }
  return all;
}

// Where no run is whole: how many ranks the one had whose stores are there; nothing where it is these ranks' own, or
// there is none, which who opens them says.
std::optional<std::uint32_t> other_number(const std::vector<PlacedStore>& around, std::uint32_t own) {
  std::optional<std::uint32_t> other;
  for (const PlacedStore& store : around) {
    if (store.waiting) continue;
    if (store.says.count == own) return std::nullopt;
    if (!other) other = store.says.count;
  }
  return other;
}

// A drive, or a part of one, that files share. Numbers of drives are a host's own: two hosts have the same ones. What
// several hosts see, as over NFS, is one of each then, and its room counts for each.
struct Disk {
  std::uint64_t id = 0, free_bytes = 0;
};
Disk disk_of(const std::filesystem::path& directory) {
  struct stat info {};
  struct statvfs volume {};
  if (::stat(directory.c_str(), &info) != 0 || ::statvfs(directory.c_str(), &volume) != 0) {
    throw Error(Code::kIo, {directory.string(), "its free space cannot be read", errno, "check the path"});
  }
  const std::string host = host_id();
  const std::uint64_t facts[] = {granule_checksum(std::as_bytes(std::span(host))), info.st_dev, volume.f_fsid,
                                 volume.f_blocks};
  return {granule_checksum(std::as_bytes(std::span(facts))), free_disk_bytes(directory)};
}

// What a new store is to take of each disk, all ranks' together, against what is free there.
class RoomBeside {
 public:
  RoomBeside(const StorePaths& paths, const StoreDirectories& room_in, const Plan& plan, Agreement& agreement) {
    std::uint64_t most[] = {room_in.size()};
    agreement.fold(std::span(most), Fold::kMax);
    const StripeMap stripes = StoreFiles::stripes_of(paths.shares);
    for (std::uint32_t i = 0; i < most[0]; ++i) {
      const bool has = i < room_in.size();
      const Disk disk = agreement.all([&] { return has ? disk_of(room_in[i]) : Disk(); });
      const auto ids = agreement.gather(disk.id), free = agreement.gather(disk.free_bytes);
      const auto bytes =
          agreement.gather(has ? StoreFiles::file_bytes(stripes, i, space_bytes(store_shape(plan))) : std::uint64_t{0});
      for (std::size_t rank = 0; rank < ids.size(); ++rank) {
        auto& [taken, left] = disks_[ids[rank]];
        taken += bytes[rank];
        left = free[rank];
        taken_ += bytes[rank];
      }
      if (has) own_.emplace_back(disk.id, room_in[i]);
    }
  }

  std::uint64_t taken_bytes() const { return taken_; }
  std::uint64_t free_bytes() const {
    std::uint64_t bytes = 0;
    for (const auto& [id, disk] : disks_) bytes += disk.second;
    return bytes;
  }
  // `otherwise`: what can be done besides making room.
  void refuse_without(const std::string& otherwise) const {
    for (const auto& [id, path] : own_) {
      const auto& [taken, left] = disks_.at(id);
      if (taken <= left) continue;
      throw Error(Code::kDoesNotFit,
                  {path.string(),
                   fmt::format("the new stores take {} MiB beside the old ones, which stay until they are complete; {} "
                               "MiB are free",
                               div_up(taken, kMiB), left / kMiB),
                   ENOSPC, "free some space, " + otherwise});
    }
  }

 private:
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> disks_;  // taken, free
  std::vector<std::pair<std::uint64_t, std::filesystem::path>> own_;
  std::uint64_t taken_ = 0;
};

std::string count_text(std::uint32_t ranks) { return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"); }

// What lies where a new store is to be, and is none of the old ones.
void refuse_strangers(const StorePaths& paths, const FormerRun& former, Rank own) {
  const bool replaces = former.ranks() > 1 && own.count > 1 && own.index < former.ranks();
  // A store of the former run is replaced only at the end, by a rename; any other is nobody's to replace.
  if (!replaces) TileStore::refuse_existing(paths);
}

// How new stores are spread beside the old ones, which make no room for them.
StorePaths spread_beside(const Config& config, const Plan& plan, StorePaths paths, const StoreDirectories& room_in) {
  if (TileStore::exists(paths)) StoreFiles::remove_leftovers(paths.directories, TileStore::kLockPatienceSeconds);
  if (paths.directories.size() > 1) return share_store(config, plan, std::move(paths), room_in, false);
  paths.shares = {1};
  return paths;
}

bool has_one_whole_commit(const RunPaths& paths, const Agreement& agreement) {
  try {
    const OpenRun run(paths, FoundStores::Purpose::kInspect);
    const auto common = newest_common(run.commits());
    if (!common || common->sequence != 1) return false;
    std::uint64_t bad = 0;
    for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
      OpenStore& store = *run.ranks[rank];
      TileStore::refuse_one_slot(store.files);
      bad += verify_step(store, run.record_of(rank, *common), {.progress = [&](auto, auto) { agreement.note_work(); }})
                 .bad_extents;
    }
    return bad == 0;
  } catch (const Error&) {  // whoever opens it says why
    return false;
  }
}

// Where other stores lie around: whether the run has made one commit so far and is whole, every byte of it, as the
// first rank sees it. Only then is the run that it goes on with removed, where a crash came before that.
bool is_just_begun(const StoreDirectories& directories, const PlacedRun& run, Agreement& agreement) {
  std::uint64_t others[] = {agreement.all([&] { return others_lie_around(directories, run); })};
  agreement.fold(std::span(others), Fold::kMax);
  if (others[0] == 0) return false;
  std::uint64_t whole[] = {agreement.all([&] {
    return agreement.rank().index == 0 && has_one_whole_commit(paths_of_run(directories, run.ranks), agreement);
  })};
  agreement.fold(std::span(whole), Fold::kMax);
  return whole[0] != 0;
}

// A store of the run that goes on with this one has its name, so that all of them were complete: what is missing of
// them now is not seen from here, and this one's work would be lost once it is.
void refuse_unseen_successor(const StoreDirectories& directories, const std::vector<PlacedStore>& around,
                             const PlacedRun& run) {
  for (const PlacedStore& store : around) {
    if (store.waiting || store.run != successor_of(run.run, store.says.count)) continue;
    OpenRun(paths_of_run(directories, store.says.count), FoundStores::Purpose::kInspect);  // says what is missing
  }
}

// Where all ranks' stores lie as those of a run do.
std::optional<StoreDirectories> directories_known_to_all(const StorePaths& paths, Rank own, Agreement& agreement) {
  auto directories = directories_of_run(paths.directories, own);
  std::uint64_t all_know[] = {directories.has_value()};
  agreement.fold(std::span(all_know), Fold::kMin);
  if (all_know[0] == 0) directories.reset();
  return directories;
}

void refuse_other_ranks(const StoreDirectories& directories, Rank own) {
  if (!others_lie_around(directories, {.run = {}, .ranks = own.count})) return;
  const bool alone = TileStore::exists(directories);
  const std::string is = own.count == 1 ? "this is one process alone" : fmt::format("{} are training", own.count);
  throw Error(Code::kExists, directories.front().string(),
              fmt::format("holds a store of {}, and {}",
                          own.count == 1 ? "several ranks"
                          : alone        ? "one process alone"
                                         : "more ranks",
                          is),
              0, Remedy::kResumeOrReplace);
}

ResumedStore begin_beside(const Config& config, const ModelDescription& model, const Plan& plan, const PlacedRun& old,
                          bool just_begun, StorePaths paths, const StoreDirectories& directories,
                          std::span<std::byte> memory, Agreement& agreement) {
  const Rank own = plan.rank;
  StoreShape shape = store_shape(plan);
  shape.name_of = [&](std::uint32_t tile) { return tile_name(plan, model, tile); };
  ResumedStore resumed;
  resumed.former = std::make_unique<FormerRun>(directories, old.ranks, shape, memory, agreement);
  const FormerRun& former = *resumed.former;
  clear_in_turn(directories, old, just_begun, agreement);  // it takes room, and places
  agreement.all([&] {
    refuse_strangers(paths, former, own);
    paths = spread_beside(config, plan, std::move(paths), directories);
  });
  const RoomBeside room(paths, directories, plan, agreement);
  const std::uint64_t beside = former.memory_bytes();
  log(LogLevel::kInfo,
      fmt::format("{}: the stores of {}, at step {}, become those of {}: together they take {} MiB of disk until that "
                  "is done, {} MiB of them new; {} MiB are free{}",
                  directories.front().string(), count_text(former.ranks()), former.committed().step,
                  count_text(own.count), div_up(former.disk_bytes() + room.taken_bytes(), kMiB),
                  div_up(room.taken_bytes(), kMiB), room.free_bytes() / kMiB,
                  beside == 0 ? "" : fmt::format("; {} KiB of memory beside host_bytes read them", beside / kKiB)));
  agreement.all([&] { room.refuse_without("or go on with " + count_text(former.ranks())); });
  const auto place = [&] {
    make_directories_of(paths, plan);
    return paths;
  };
  resumed.store = create_beside(shape, successor_of(former.run(), own.count), place, agreement);
  return resumed;
}

// In place of a run with another number of ranks, which may yet go on: its stores make no room for the new ones.
std::unique_ptr<TileStore> replace_beside(const Config& config, const Plan& plan, const PlacedRun& old,
                                          const RunId& run, StorePaths paths, const StoreDirectories& directories,
                                          Agreement& agreement) {
  agreement.all([&] {  // what waits for its name there would be taken for a leftover
    FoundStores found(paths, FoundStores::Purpose::kReplace);
    if (found.waiting && run_of(found.waiting->superblock()) == old.run) found.waiting->repair();
  });
  clear_in_turn(directories, old, false, agreement);
  agreement.all([&] {
    make_directories_of(paths, plan);
    const StoreDirectories own = paths.directories;
    paths = spread_beside(config, plan, std::move(paths), own);
  });
  const RoomBeside room(paths, paths.directories, plan, agreement);
  agreement.all([&] { room.refuse_without("remove the old run, or name another nvme_path"); });
  const auto place = [&] { return paths; };
  return create_together(paths, store_shape(plan), TileStore::Existing::kStays, place, {}, agreement, run);
}

}  // namespace

ResumedStore resume_store(const Config& config, const ModelDescription& model, const Plan& plan,
                          std::span<std::byte> memory, Agreement& agreement) {
  const StorePaths paths = agreement.all([&] { return paths_to_resume(config, plan); });
  const Rank own = plan.rank;
  const auto directories = directories_known_to_all(paths, own, agreement);
  const auto go_on = [&] { return open_store(paths, model, plan, agreement); };
  if (!directories) return {.store = go_on(), .former = nullptr};
  const std::vector<PlacedStore> around = find_stores_on_all_ranks(*directories, agreement);
  const std::vector<PlacedRun> runs = choose_placed_run(around);
  agreement.all([&] {
    if (runs.size() > 1) refuse_several(*directories, runs);
    const auto other = runs.empty() ? other_number(around, own.count) : std::nullopt;
    if (other) OpenRun(paths_of_run(*directories, *other), FoundStores::Purpose::kInspect);  // says what is missing
    if (!runs.empty()) refuse_unseen_successor(*directories, around, runs[0]);
  });
  // No whole run is in sight: opening what these ranks have says best what is wrong.
  if (runs.empty()) return {.store = go_on(), .former = nullptr};
  const PlacedRun& run = runs[0];
  const bool just_begun = is_just_begun(*directories, run, agreement);
  if (run.ranks != own.count) {
    return begin_beside(config, model, plan, run, just_begun, paths, *directories, memory, agreement);
  }
  ResumedStore resumed{.store = go_on(), .former = nullptr};
  // Only after the run's own stores are open: before, they might turn out not to be whole.
  clear_in_turn(*directories, run, just_begun, agreement);
  return resumed;
}

NewStore begin_store(const Config& config, const Plan& plan, bool replace, Agreement& agreement,
                     const std::function<void()>& before_loss) {
  NewStore begun;
  std::uint64_t has_store[] = {plan.has_store};
  agreement.fold(std::span(has_store), Fold::kMin);
  std::optional<RunId> run;
  if (has_store[0] != 0) {
    const StorePaths paths = agreement.all([&] { return paths_of_store(config); });
    const Rank own = plan.rank;
    const auto directories = directories_known_to_all(paths, own, agreement);
    if (directories && !replace) agreement.all([&] { refuse_other_ranks(*directories, own); });
    if (directories && replace) {
      const std::vector<PlacedStore> around = find_stores_on_all_ranks(*directories, agreement);
      const std::vector<PlacedRun> runs = choose_placed_run(around);
      agreement.all([&] {
        if (runs.size() > 1) refuse_several(*directories, runs);
      });
      // Also of an older one, which a crash has left where its successor lies.
      const auto is_other = [&](const PlacedStore& store) { return !store.waiting && store.run != runs[0].run; };
      if (!runs.empty() && (runs[0].ranks != own.count || std::ranges::any_of(around, is_other))) {
        run = successor_of(runs[0].run, own.count);
        begun.replaced = {*directories, {.run = *run, .ranks = own.count}};
      }
      if (!runs.empty() && runs[0].ranks != own.count) {
        begun.store = replace_beside(config, plan, runs[0], *run, paths, *directories, agreement);
        return begun;
      }
    }
  }
  begun.store = make_store(config, plan, replace, agreement, before_loss, run);
  return begun;
}

void clear_in_turn(const StoreDirectories& directories, const PlacedRun& goes_on, bool just_begun,
                   Agreement& agreement) {
  for (std::uint32_t rank = 0; rank < agreement.rank().count; ++rank) {
    agreement.all([&] {
      if (rank == agreement.rank().index) clear_around(directories, goes_on, just_begun);
    });
  }
}

}  // namespace spillway
