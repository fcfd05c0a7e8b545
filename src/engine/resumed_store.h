// The stores that a run resumes: those that it left, or, where it had another number of ranks, new ones made from them
// (former_run.h). It finds out which of the two it is, and refuses what fits neither; making and opening are
// store_place.h and rank_stores.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "spillway/config.h"
#include "spillway/model.h"
#include "src/comm/agreement.h"
#include "src/engine/former_run.h"
#include "src/plan/plan.h"
#include "swap/tile_store.h"

namespace spillway {

struct ResumedStore {
  std::unique_ptr<TileStore> store;
  // Where the store is a new one, without a commit, what is to be brought into it. Else null.
  std::unique_ptr<FormerRun> former;
};

// Collective. Looks for the run at the place where these ranks have their stores (run_places.h). Throws what
// open_store() does, and what FormerRun and create_beside() do; kExists where another store lies in a new one's place;
// kDoesNotFit where a disk has no room for the new stores beside the old ones. Nothing is written before that is known.
// `memory`: of the plan's, that nothing uses before the first step (HostPlan::others), for a tile of the old run.
ResumedStore resume_store(const Config& config, const ModelDescription& model, const Plan& plan,
                          std::span<std::byte> memory, Agreement& agreement);

// What a new run's stores take the place of, which goes once they are complete.
struct ReplacedRun {
  StoreDirectories directories;
  PlacedRun by;
};
struct NewStore {
  std::unique_ptr<TileStore> store;  // null: the plan has none
  std::optional<ReplacedRun> replaced;
};

// Collective. A new store, where these ranks have theirs (make_store()). Throws kExists where the stores of another
// number of ranks lie there, unless it is to `replace` them: they stay until the new ones are complete.
NewStore begin_store(const Config& config, const Plan& plan, bool replace, Agreement& agreement,
                     const std::function<void()>& before_loss);

// clear_around() on every rank, one after the other: directories are of several ranks, or of one host's. Collective.
void clear_in_turn(const StoreDirectories& directories, const PlacedRun& goes_on, bool just_begun,
                   Agreement& agreement);

}  // namespace spillway
