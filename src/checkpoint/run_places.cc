#include "src/checkpoint/run_places.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <exception>
#include <string_view>
#include <system_error>

#include "spillway/error.h"
#include "spillway/log.h"
#include "src/formats/plain_file.h"
#include "swap/store_files.h"
#include "swap/tile_store.h"

namespace spillway {
namespace {

std::optional<std::uint32_t> rank_in(const std::string& name) {
  constexpr std::string_view kBefore = "rank";
  std::uint32_t rank = 0;
  if (!name.starts_with(kBefore)) return std::nullopt;
  const auto [end, failure] = std::from_chars(name.data() + kBefore.size(), name.data() + name.size(), rank);
  if (failure != std::errc() || directory_of_rank("", rank) != name) return std::nullopt;
  return rank;
}

bool lies_at(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

StoreDirectories below(const StoreDirectories& run, std::optional<std::uint32_t> rank) {
  if (!rank) return run;
  StoreDirectories directories;
  for (const auto& path : run) directories.push_back(directory_of_rank(path, *rank));
  return directories;
}

std::set<std::uint32_t> ranks_named_below(const std::filesystem::path& path) {
  std::set<std::uint32_t> ranks;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    if (const auto rank = rank_in(entry.path().filename().string())) ranks.insert(*rank);
  }
  return ranks;
}

// Nothing, and then every rank's that is below any of the directories.
std::vector<std::optional<std::uint32_t>> places_in(const StoreDirectories& run) {
  std::set<std::uint32_t> ranks;
  for (const auto& path : run) ranks.merge(ranks_named_below(path));
  std::vector<std::optional<std::uint32_t>> places = {std::nullopt};
  places.insert(places.end(), ranks.begin(), ranks.end());
  return places;
}

bool is_place_of(const PlacedRun& run, const std::optional<std::uint32_t>& rank) {
  return run.ranks == 1 ? !rank : rank && *rank < run.ranks;
}

void put_found(std::vector<PlacedStore>& all, const std::optional<std::uint32_t>& rank, bool waiting,
               const std::optional<StoreFiles>& files) {
  if (!files) return;
  const Superblock& block = files->superblock();
  all.push_back({.rank = rank, .waiting = waiting, .run = run_of(block), .says = {block.rank, block.ranks}});
}

// What is still there after somebody was to remove it.
void warn_of_leftover(const std::filesystem::path& file, std::string_view why) {
  if (!lies_at(file)) return;
  log(LogLevel::kWarning, fmt::format("{}: is left of an earlier run and could not be removed ({}); remove it by hand",
                                      file.string(), why));
}

// Whoever holds it has it still. What is none of that run's is nobody's to remove.
void remove_replaced(const std::filesystem::path& file, const PlacedRun& goes_on) {
  const Superblock block = StoreFiles::superblock_of(File::open(file, {.direct = false}));
  if (successor_of(run_of(block), goes_on.ranks) != goes_on.run) return;
  try {
    File old = File::open(file, {.writable = true, .direct = false});
    old.lock(0);
    if (old.at_its_path()) remove_old_store(file);
  } catch (const std::exception& error) {
    warn_of_leftover(file, error.what());
  }
}

}  // namespace

void remove_old_store(const std::filesystem::path& file) {
  if (::unlink(file.c_str()) != 0) return warn_of_leftover(file, std::generic_category().message(errno));
  sync_directory(file.parent_path());
}

RunPaths paths_of_run(const StoreDirectories& run, std::uint32_t ranks) {
  if (ranks == 1) return {run};
  RunPaths paths;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) paths.push_back(below(run, rank));
  return paths;
}

std::optional<StoreDirectories> directories_of_run(const StoreDirectories& store, Rank rank) {
  if (rank.count == 1) return store;
  StoreDirectories run;
  for (const auto& path : store) {
    const std::filesystem::path plain = (path / "").parent_path();  // without a slash at its end
    if (rank_in(plain.filename().string()) != rank.index) return std::nullopt;
    run.push_back(plain.has_parent_path() ? plain.parent_path() : std::filesystem::path("."));
  }
  return run;
}

std::set<std::uint32_t> ranks_below(const std::filesystem::path& path) {
  std::set<std::uint32_t> ranks = ranks_named_below(path);
  std::erase_if(ranks, [&](std::uint32_t rank) {
    const auto directory = directory_of_rank(path, rank);
    return !lies_at(directory / kStoreFileName) && !lies_at(StoreFiles::temporary_name(directory));
  });
  return ranks;
}

// Before format 4 a store has a name of its own alone.
RunId run_of(const Superblock& block) {
  const RunId run{{block.run_id[0], block.run_id[1]}};
  return run == RunId{} ? RunId{{block.store_id[0], block.store_id[1]}} : run;
}

std::vector<PlacedStore> find_stores(const StoreDirectories& run) {
  std::vector<PlacedStore> all;
  for (const auto& rank : places_in(run)) {
    const StorePaths paths(below(run, rank));
    try {
      put_found(all, rank, false, FoundStores::inspect_named(paths));
    } catch (const Error&) {  // not a whole one
    }
    put_found(all, rank, true, FoundStores::inspect_waiting(paths));
  }
  return all;
}

bool others_lie_around(const StoreDirectories& run, const PlacedRun& goes_on) {
  return std::ranges::any_of(places_in(run), [&](const std::optional<std::uint32_t>& rank) {
    return !is_place_of(goes_on, rank) && std::ranges::any_of(below(run, rank), [](const auto& directory) {
      return lies_at(directory / kStoreFileName);
    });
  });
}

void clear_around(const StoreDirectories& run, const PlacedRun& goes_on, bool just_begun) {
  for (const auto& rank : places_in(run)) {
    if (is_place_of(goes_on, rank)) continue;
    for (const auto& directory : below(run, rank)) {
      const auto waiting = StoreFiles::temporary_name(directory), named = directory / kStoreFileName;
      try {
        StoreFiles::remove_leftovers(std::span(&directory, 1), 0);
        warn_of_leftover(waiting, "its directory cannot be written to");
      } catch (const std::exception& error) {  // a process has it
        warn_of_leftover(waiting, error.what());
      }
      try {
        if (just_begun && lies_at(named)) remove_replaced(named, goes_on);
      } catch (const std::exception&) {  // it is none, or it has gone meanwhile
      }
      if (rank) ::rmdir(directory.c_str());  // which an empty one alone is
    }
  }
}

}  // namespace spillway
