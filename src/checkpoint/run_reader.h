// Tiles of stores that no engine has open, read and verified: of one store, and of those of all ranks of a run, at the
// newest step that all have. Thread: one. Errors: kCorrupt names tile, file and offset; kIo.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/checkpoint/run_inspection.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "swap/policy/run_stores.h"
#include "swap/store_files.h"
#include "swap/tile_mover.h"
#include "swap/tile_store.h"

namespace spillway {

class TileReader {
 public:
  // `tile_bytes`: of the largest, with its padding. `memory`: the caller's, of whole pages, where it is large enough;
  // else its own.
  explicit TileReader(std::uint64_t tile_bytes, std::span<std::byte> memory = {});
  std::uint64_t own_bytes() const { return own_ ? own_->size : 0; }

  // Valid until the next call. `name_of`: for messages.
  TileMemory read(const TileStore& store, std::uint32_t tile,
                  const std::function<std::string(std::uint32_t tile)>& name_of);

 private:
  std::optional<AlignedBuffer> own_;
  std::span<std::byte> memory_;
  std::vector<std::uint64_t> granules_;
};

class RunReader {
 public:
  // Takes the stores over. kUnsupported: one keeps no step; kCorrupt: they have none in common.
  // `memory`: as TileReader's. `progress`: TileStore::found()'s.
  explicit RunReader(OpenRun& run, std::span<std::byte> memory = {}, const TileStore::Progress& progress = {});

  std::uint64_t own_bytes() const { return reader_->own_bytes(); }
  const Commit& commit() const { return commit_; }
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(parts_.size()); }
  const StoredModel& stored() const { return parts_[0]->stored; }
  const Plan& plan(std::uint32_t rank) const { return parts_[rank]->plan; }
  TileStore& store(std::uint32_t rank) const { return *parts_[rank]->store; }

  struct Tile {
    std::uint32_t block = 0;
    std::uint64_t first = 0;  // in its flat vector
    std::uint32_t rank = 0, tile = 0;
    auto operator<=>(const Tile&) const = default;
  };
  // Of all ranks, in the order of the model.
  const std::vector<Tile>& tiles() const { return tiles_; }

  // Valid until the next call. The same tile again is not read again.
  TileMemory read(std::uint32_t rank, std::uint32_t tile);

 private:
  struct Part {
    StoredModel stored;
    Plan plan;
    std::unique_ptr<TileStore> store;
  };
  std::vector<std::unique_ptr<Part>> parts_;
  Commit commit_;
  std::vector<Tile> tiles_;
  std::optional<TileReader> reader_;
  std::optional<std::pair<std::uint32_t, std::uint32_t>> last_;
  TileMemory of_last_;
};

}  // namespace spillway
