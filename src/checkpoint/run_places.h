// Where the stores of a run lie: one rank's in the directories that the run was given, rank r's of several in `rank<r>`
// below each. So what one number of ranks has left is found by another. Thread: any, one at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <vector>

#include "spillway/rank_directory.h"
#include "spillway/store.h"
#include "swap/policy/run_stores.h"
#include "swap/rank.h"
#include "swap/superblock.h"

namespace spillway {

using StoreDirectories = std::vector<std::filesystem::path>;

// Of each rank its store's directories.
RunPaths paths_of_run(const StoreDirectories& run, std::uint32_t ranks);
// The run's, by those of a rank's store; nothing where they are not named like that.
std::optional<StoreDirectories> directories_of_run(const StoreDirectories& store, Rank rank);

// The ranks that have a store below a directory, or one that waits for its name.
std::set<std::uint32_t> ranks_below(const std::filesystem::path& path);

// Also of a store of an older format, which is a run's of its own.
RunId run_of(const Superblock& block);

// Every whole store in the directories of a run and below them. A store that is not whole is left out: whoever opens it
// says what is wrong with it.
std::vector<PlacedStore> find_stores(const StoreDirectories& run);

// Whether a store has its name there besides those of that run, or a part of one.
bool others_lie_around(const StoreDirectories& run, const PlacedRun& goes_on);

// Removes what lies there besides the stores of that run, which goes on: what a run that was cut short has left under
// temporary names, unless a process has it; where `just_begun`, also stores that it has taken the place of; and
// directories of ranks that are empty then. What cannot be removed stays, and the log names it.
void clear_around(const StoreDirectories& run, const PlacedRun& goes_on, bool just_begun);
// Of one that was replaced. Who removes it may not do so, and the run goes on all the same: the log says which.
void remove_old_store(const std::filesystem::path& file);

}  // namespace spillway
