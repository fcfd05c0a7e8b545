// The stores of a run that goes on with another number of ranks. Every new rank reads what overlaps its own tiles,
// verified, bit for bit; the old stores stay as they are until all of the new ones are committed.
//
//   FormerRun former(directories, ranks, shape, agreement);   each rank sees all stores of it
//   former.fill(plan, tile, memory);                          for each tile of the new rank's plan, in order
//   former.remove(new_ranks);                                 after the new stores' first common commit
//
// The first rank holds the locks on them meanwhile. Which stores there are is found by resumed_store.cc. Thread: one,
// the engine's. Errors: kNotFound and kInvalidArgument name what does not belong together, kBusy, kUnsupported (no step
// is kept), kCorrupt (a tile is not as it was written).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "src/checkpoint/run_places.h"
#include "src/checkpoint/run_reader.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"
#include "swap/policy/run_stores.h"
#include "swap/store_shape.h"
#include "swap/tile_mover.h"

namespace spillway {

class FormerRun {
 public:
  // Collective. `ranks`: how many it has. `wanted`: what the new stores are of; those of another model or other
  // settings are refused. What was to be renamed, as they were made, is. `memory`: for an old tile (TileReader).
  FormerRun(StoreDirectories directories, std::uint32_t ranks, const StoreShape& wanted, std::span<std::byte> memory,
            Agreement& agreement);

  std::uint32_t ranks() const { return reader_->ranks(); }
  const StoreDirectories& directories() const { return directories_; }
  RunId run() const;
  std::uint64_t disk_bytes() const;
  std::uint64_t memory_bytes() const { return reader_->own_bytes(); }  // beside what it was given
  // Step, update counts and the caller's blob, which are the same on all ranks; of the first one.
  const Manifest& committed() const { return reader_->store(0).committed(); }

  void fill(const Plan& plan, std::uint32_t tile, const TileMemory& memory);
  // Those whose places the new ones, of so many ranks, have not taken.
  void remove(std::uint32_t new_ranks);

 private:
  using CommitIdentity = std::array<std::uint64_t, 6>;  // sequence, step, and what else must be the same for every rank

  void open(const RunPaths& paths, std::span<std::byte> memory, FoundStores::Purpose purpose,
            const Agreement& agreement);
  CommitIdentity commit_identity() const;

  const StoreDirectories directories_;
  std::optional<RunReader> reader_;
};

}  // namespace spillway
