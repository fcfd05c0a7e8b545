#include "src/engine/former_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "swap/tile_arrays.h"

namespace spillway {

FormerRun::FormerRun(StoreDirectories directories, std::uint32_t ranks, const StoreShape& wanted,
                     std::span<std::byte> memory, Agreement& agreement)
    : directories_(std::move(directories)) {
  using Purpose = FoundStores::Purpose;
  const RunPaths paths = paths_of_run(directories_, ranks);
  const bool first = agreement.rank().index == 0;
  agreement.all([&] {
    if (first) open(paths, memory, Purpose::kUse, agreement);
  });
  agreement.all([&] {
    if (!first) open(paths, memory, Purpose::kInspect, agreement);
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
      TileStore::refuse_other_model(reader_->store(rank).files(), wanted);
  });
  if (agreement.alone()) return;
  const CommitIdentity own = commit_identity();
  CommitIdentity firsts = own;
  agreement.broadcast(std::as_writable_bytes(std::span(firsts)), 0);
  agreement.all([&] {
    if (own == firsts) return;
    throw Error(
        Code::kInvalidArgument,
        {directories_.front().string(),
         fmt::format("its stores are at step {} here, and at step {} where rank 0 reads them", own[1], firsts[1]), 0,
         "bring the stores of one run, as they were at one time, to every host"});
  });
}

// Each rank reads the stores itself. Copies of another time on another host would be mixed.
FormerRun::CommitIdentity FormerRun::commit_identity() const {
  const Manifest& last = committed();
  return {last.sequence,
          last.step,
          run().word[0],
          run().word[1],
          granule_checksum(std::as_bytes(std::span(last.blob))),
          granule_checksum(std::as_bytes(std::span(last.update_counts)))};
}

// What waits for its name gets it: a new store is to come under the other.
void FormerRun::open(const RunPaths& paths, std::span<std::byte> memory, FoundStores::Purpose purpose,
                     const Agreement& agreement) {
  OpenRun run(paths, purpose);
  reader_.emplace(run, memory, [&](auto, auto) { agreement.note_work(); });
  for (std::uint32_t rank = 0; purpose == FoundStores::Purpose::kUse && rank < ranks(); ++rank)
    reader_->store(rank).files().repair();
}

RunId FormerRun::run() const { return run_of(reader_->store(0).files().superblock()); }

std::uint64_t FormerRun::disk_bytes() const {
  std::uint64_t bytes = 0;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    for (const File& file : reader_->store(rank).files().files()) bytes += file.size_bytes();
  }
  return bytes;
}

// Every tile starts and ends at a multiple of kPartitionUnit, of whatever rank it is, so that no group of elements with
// one scale is cut.
void FormerRun::fill(const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
  const std::uint32_t block = plan.tiles[tile].block;
  const TileRange& range = plan.tiles[tile].range;
  const TileShape& shape = plan.tile_places[tile].shape;
  std::uint64_t done = 0;
  const auto by_block = [](const RunReader::Tile& a, const RunReader::Tile& b) { return a.block < b.block; };
  const auto& tiles = reader_->tiles();
  const auto [first, last] =
      std::equal_range(tiles.begin(), tiles.end(), RunReader::Tile{.block = block, .first = 0}, by_block);
  for (const RunReader::Tile& old : std::span(first, last)) {
    const Plan& of = reader_->plan(old.rank);
    const std::uint64_t begin = std::max(old.first, range.first);
    const std::uint64_t end = std::min(old.first + of.tiles[old.tile].range.count, range.first + range.count);
    if (begin >= end) continue;
    // Old and new tiles are cut at different places: each pair that overlaps gives its part, bit for bit.
    copy_elements(of.tile_places[old.tile].shape, reader_->read(old.rank, old.tile), shape, memory,
                  {.from = begin - old.first, .to = begin - range.first, .count = end - begin});
    done += end - begin;
  }
  SPILLWAY_CHECK(done == range.count, "the tiles of all ranks are the whole model");
}

void FormerRun::remove(std::uint32_t new_ranks) {
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    // A new rank's store has taken the very name of this one, so there is no old file left to remove.
    const bool taken = ranks() > 1 && rank < new_ranks && new_ranks > 1;
    for (const File& file : reader_->store(rank).files().files()) {
      if (taken || !file.at_its_path()) continue;
      remove_old_store(file.path());
    }
  }
  reader_.reset();
}

}  // namespace spillway
