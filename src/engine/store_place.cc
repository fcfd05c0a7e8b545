#include "src/engine/store_place.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/rate_probe.h"
#include "src/engine/rank_stores.h"
#include "src/formats/plain_file.h"

namespace spillway {
namespace {

// Shares of a new store's space by each path's rate, as far as its drive has room.
std::vector<std::uint32_t> choose_shares(const Config& config, std::span<const std::filesystem::path> paths,
                                         const IoQueueOptions& io, std::uint64_t space_bytes, bool makes_room) {
  std::vector<std::uint64_t> room;
  std::uint64_t have = 0;
  for (const auto& path : paths) {
    // A store that is replaced gives its space to the new one.
    room.push_back(free_disk_bytes(path) + (makes_room ? TileStore::file_bytes(path) : 0));
    have += room.back();
    // The superblocks, and the unit by which a row that is cut short exceeds the shares.
    room.back() -= std::min(room.back(), paths.size() > 1 ? 2 * kMiB : kExtentAlignment);
  }
  std::vector<double> rates = config.nvme_rates;
  const bool measured = rates.empty() && paths.size() > 1;
  for (std::size_t i = rates.size(); i < paths.size(); ++i)
    // With one path there is nothing to share, so nothing is measured.
    rates.push_back(measured ? probe_rate(paths[i], io) / 1e9 : 1);
  const std::vector<std::uint32_t> shares = stripe_shares(rates, room, space_bytes, kStripeRowUnits);
  if (shares.empty()) {
    throw Error(
        Code::kDoesNotFit, paths.size() == 1 ? paths[0].string() : "spillway.nvme_paths",
        fmt::format("the store takes {} MiB, {} MiB are free", div_up(space_bytes, kMiB), have / kMiB), ENOSPC,
        config.commit_every == 0u ? Hint("free some space, or name another nvme_path") : Remedy::kMakeRoomOrHalve);
  }
  for (std::size_t i = 0; paths.size() > 1 && i < paths.size(); ++i) {
    if (shares[i] == 0) {
      throw Error(Code::kDoesNotFit, {paths[i].string(),
                                      fmt::format("is too slow ({:.2f} GB/s) or too full ({} MiB free) for a share",
                                                  rates[i], room[i] / kMiB),
                                      0, "leave it out of spillway.nvme_paths, or free some space"});
    }
    log(LogLevel::kInfo,
        fmt::format("{}: {:.2f} GB/s{}, {} of {} parts of the store", paths[i].string(), rates[i],
                    measured ? " measured" : "", shares[i], std::accumulate(shares.begin(), shares.end(), 0u)));
  }
  return shares;
}

// For its owner only; one that is there already keeps what its owner has set. Its name is as durable as the store in
// it: whoever loses the one has lost the other.
void make_directory(const std::filesystem::path& directory) {
  std::error_code failure;
  const std::filesystem::path plain = (directory / "").parent_path();  // without a slash at its end
  std::vector<std::filesystem::path> parents;                          // that get a new entry
  for (auto at = std::filesystem::absolute(plain, failure); !at.empty() && !std::filesystem::exists(at, failure);) {
    parents.push_back(at = at.parent_path());
  }
  if (plain.has_parent_path()) std::filesystem::create_directories(plain.parent_path(), failure);
  if (!failure && ::mkdir(plain.c_str(), 0700) != 0) {
    if (errno != EEXIST) {
      failure = {errno, std::generic_category()};
    } else if (!std::filesystem::is_directory(plain, failure) && !failure) {
      failure = {ENOTDIR, std::generic_category()};
    }
  }
  if (failure) {
    throw Error(Code::kIo, {directory.string(), "cannot be created", failure.value(),
                            failure == std::errc::no_space_on_device ? "make room, or name another nvme_path"
                                                                     : "check nvme_path and its permissions"});
  }
  for (const auto& parent : parents) sync_directory(parent);
}

std::filesystem::path absolute_path(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(directory, error);
  if (!error) return path;
  throw Error(Code::kIo, {directory.string(), "cannot be found from the directory that this process is in",
                          error.value(), "name the directory in full"});
}

std::string listed(std::span<const std::filesystem::path> paths) {
  std::string list;
  for (const auto& path : paths) list += (list.empty() ? "" : ", ") + path.string();
  return list;
}

}  // namespace

IoQueueOptions queue_options(const Config& config) {
  return {.engine = config.io_engine,
          .block_bytes = align_up(config.io_block_bytes, std::uint64_t{4 * kKiB}),
          .depth = config.io_depth};
}

std::unique_ptr<StoreThread> start_store_thread(const Config& config, TileStore& store, std::span<std::byte> host,
                                                Timeline* timeline) {
  IoQueueOptions options = queue_options(config);
  // Requests then name offsets of the store's space, and the queue finds file and offset in it.
  options.stripes = &store.files().stripes();
  auto thread = std::make_unique<StoreThread>(options, store.files().pointers(),
                                              std::vector<std::span<std::byte>>{host}, timeline);
  thread->keep_steps(config.commit_every != 0u);
  return thread;
}

Error store_is_missing(const File& file) {
  return Error(Code::kNotFound,
               {file.path().string(), "was removed, moved or cut short while its run goes on, so no step is kept", 0,
                "write the model or a snapshot before the run ends"});
}

const File* warn_if_missing(TileStore& store, const File* known) {
  const File* const missing = store.missing();
  if (missing && !known) log(LogLevel::kWarning, store_is_missing(*missing).what());
  return missing;
}

// The process may go to another directory before the store has its name, or while it is looked after.
StorePaths paths_of_store(const Config& config) {
  StorePaths paths(config.nvme_paths);
  for (auto& directory : paths.directories) directory = absolute_path(directory);
  return paths;
}

StorePaths paths_to_resume(const Config& config, const Plan& plan) {
  if (plan.has_store) return paths_of_store(config);
  throw Error(Code::kNotFound, {"nvme_path", "names no store: there is none to resume", 0,
                                "name its directory beside a device nvme, or in spillway.nvme_paths"});
}

StorePaths share_store(const Config& config, const Plan& plan, StorePaths paths, const StorePaths& room_in,
                       bool makes_room) {
  paths.shares =
      choose_shares(config, room_in.directories, queue_options(config), space_bytes(store_shape(plan)), makes_room);
  return paths;
}

void make_directories_of(const StorePaths& paths, const Plan& plan) {
  for (const auto& directory : paths.directories) make_directory(directory);
  log(LogLevel::kInfo,
      fmt::format("the store in {} takes {} MiB of disk: {} slots of {} tiles", listed(paths.directories),
                  div_up(plan.store_bytes, kMiB), plan.slots, plan.tiles.size()));
}

std::unique_ptr<TileStore> open_store(const StorePaths& paths, const ModelDescription& model, const Plan& plan,
                                      Agreement& agreement) {
  StoreShape shape = store_shape(plan);
  shape.name_of = [&](std::uint32_t tile) { return tile_name(plan, model, tile); };
  return agreement.alone() ? TileStore::open(paths, shape) : open_together(paths, shape, agreement);
}

std::unique_ptr<TileStore> make_store(const Config& config, const Plan& plan, bool replace, Agreement& agreement,
                                      const std::function<void()>& before_loss, const std::optional<RunId>& run) {
  if (!plan.has_store) return nullptr;
  const auto existing = replace ? TileStore::Existing::kMakesRoom : TileStore::Existing::kNone;
  const StorePaths paths = agreement.all([&] { return paths_of_store(config); });
  const auto place = [&] {
    for (const auto& directory : paths.directories) make_directory(directory);
    if (!replace && TileStore::exists(paths)) return paths;
    StorePaths shared = share_store(config, plan, paths, paths, true);
    make_directories_of(shared, plan);
    return shared;
  };
  if (!agreement.alone())
    return create_together(paths, store_shape(plan), existing, place, before_loss, agreement, run);
  if (!run) return TileStore::create(place(), store_shape(plan), replace, before_loss);
  auto store = TileStore::reserve_new(place(), store_shape(plan), existing);
  if (before_loss && store->takes_over()) before_loss();
  store->make(store_shape(plan), *run);
  return store;
}

std::unique_ptr<TileStore> open_store(const Config& config, const ModelDescription& model, const Plan& plan,
                                      OnExisting on_existing, const std::function<void()>& before_loss) {
  Agreement alone(nullptr);
  if (on_existing == OnExisting::kResume) return open_store(paths_to_resume(config, plan), model, plan, alone);
  return make_store(config, plan, on_existing == OnExisting::kReplace, alone, before_loss);
}

}  // namespace spillway
