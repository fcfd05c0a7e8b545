// Where a run's store lies: the directories, and which part of it each of several drives gets.
#pragma once

#include <functional>
#include <memory>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/io_queue.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"

namespace spillway {

// The store of `plan`, made anew or, to resume, opened, with those of the other ranks; null where the plan has none.
// Throws what TileStore and rank_stores do, and kDoesNotFit before anything is written.
std::unique_ptr<TileStore> open_store(const Config& config, const ModelDescription& model, const Plan& plan,
                                      OnExisting on_existing, Agreement& agreement,
                                      const std::function<void()>& before_loss = {});
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
const File* look_after(TileStore& store, const File* known);

}  // namespace spillway
