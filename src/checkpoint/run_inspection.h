// The stores of several ranks, looked at together without the run that made them. The functions of spillway/store.h
// that are named after a run are here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "spillway/error.h"
#include "spillway/store.h"
#include "src/checkpoint/run_places.h"
#include "src/checkpoint/store_inspection.h"
#include "swap/policy/run_stores.h"
#include "swap/tile_store.h"

namespace spillway {

// Why that rank's store does not go on with the others: what it has at `path` is of another run, or nothing.
Error refused_store(const RunChoice& choice, std::span<const RankStores> ranks, std::uint32_t rank,
                    const std::filesystem::path& path);

// kInvalidArgument: more than one run could be gone on with.
[[noreturn]] void refuse_several(const StoreDirectories& paths, std::span<const PlacedRun> runs);

// All stores of a run, open; of one kind, and each in its rank's place.
struct OpenRun {
  OpenRun(const RunPaths& paths, FoundStores::Purpose purpose);

  std::vector<RankCommits> commits() const;
  // The record of that commit, which the rank must have.
  const Manifest& record_of(std::size_t rank, const Commit& commit) const;

  RunChoice choice;
  std::vector<std::unique_ptr<OpenStore>> ranks;
};

// To read what is committed: waits for a run that is at one of them, or has just been killed, to end; kBusy.
std::unique_ptr<OpenRun> open_when_free(const RunPaths& paths);

// kCorrupt, saying which steps each rank has.
Error no_common_step(const std::filesystem::path& path, std::span<const RankCommits> ranks);

}  // namespace spillway
