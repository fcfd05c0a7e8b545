// The stores of all ranks, made or opened as one: ready on every rank, or refused on every rank with one message and
// left as they were. What the ranks have found is collected here; what follows from it is decided by
// swap/policy/run_stores.h, and done by TileStore (swap/tile_store.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "src/comm/agreement.h"
#include "swap/tile_store.h"

namespace spillway {

// All ranks call these, each with its own paths and shape. They throw the same Error on all: what TileStore's functions
// of these names throw on the lowest rank where they do, and what follows.

// At the newest commit that all have. kNotFound where some rank has no store, kInvalidArgument where the stores are not
// of one run, kCorrupt where they have no step in common. A replacement that was cut short is finished or undone.
std::unique_ptr<TileStore> open_together(const StorePaths& paths, const StoreShape& shape, Agreement& agreement);

// New ones, of one run. `place`: makes the directories of this rank, and says how the store is spread over them. Old
// ones go when TileStore::note_all_committed() is called on every rank, or now where a disk has no room for both:
// `before_loss`, unless null, is called first, on every rank. `run`: its id, the same on all; nothing: a random one.
std::unique_ptr<TileStore> create_together(const StorePaths& paths, const StoreShape& shape,
                                           TileStore::Existing existing, const std::function<StorePaths()>& place,
                                           const std::function<void()>& before_loss, Agreement& agreement,
                                           const std::optional<RunId>& run = {});

// The same beside those of another number of ranks, which stay until the new ones are complete; all of that run.
std::unique_ptr<TileStore> create_beside(const StoreShape& shape, const RunId& run,
                                         const std::function<StorePaths()>& place, Agreement& agreement);

}  // namespace spillway
