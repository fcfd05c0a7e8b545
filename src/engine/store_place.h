// Where a run's store lies: the directories, and which part of it each of several drives gets. Also how its queue and
// its thread are started. What is in the store: swap/tile_store.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/io_queue.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"

namespace spillway {

// The store of `plan`, made anew, with those of the other ranks; null where the plan has none. `run`: its id; nothing:
// one of its own. Throws what TileStore and rank_stores do, and kDoesNotFit before anything is written.
std::unique_ptr<TileStore> make_store(const Config& config, const Plan& plan, bool replace, Agreement& agreement,
                                      const std::function<void()>& before_loss = {},
                                      const std::optional<RunId>& run = {});
// To resume: opened, at these paths.
std::unique_ptr<TileStore> open_store(const StorePaths& paths, const ModelDescription& model, const Plan& plan,
                                      Agreement& agreement);
// The directories of its configuration, in full. Throws kNotFound where the plan has no store to resume.
StorePaths paths_to_resume(const Config& config, const Plan& plan);
// The same of a new store.
StorePaths paths_of_store(const Config& config);
// A new store's, and which share of it each gets by its drive's rate as far as that has room: `room_in` the directories
// themselves, or ones on the same drives. `makes_room`: what lies there goes for it.
StorePaths share_store(const Config& config, const Plan& plan, StorePaths paths, const StorePaths& room_in,
                       bool makes_room);
// Makes them, and says what the store will take.
void make_directories_of(const StorePaths& paths, const Plan& plan);
// Of a run with one rank.
std::unique_ptr<TileStore> open_store(const Config& config, const ModelDescription& model, const Plan& plan,
                                      OnExisting on_existing, const std::function<void()>& before_loss = {});

// How the run drives it, and the thread that does; `host`: the arena.
IoQueueOptions queue_options(const Config& config);
std::unique_ptr<StoreThread> start_store_thread(const Config& config, TileStore& store, std::span<std::byte> host,
                                                Timeline* timeline = nullptr);

// Of a file that TileStore::missing() names: a step in it survives nothing.
Error store_is_missing(const File& file);
// Looks whether there is one, and logs it unless it was `known` before.
const File* warn_if_missing(TileStore& store, const File* known);

}  // namespace spillway
