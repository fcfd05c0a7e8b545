// Refuses ranks that do not belong to one run before anything is made. It compares what each rank was given; what the
// ranks' stores hold is compared by rank_stores.h.
#pragma once

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "src/checkpoint/snapshot.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"

namespace spillway {

// What must be the same on all ranks: version, model, what a step computes, and how HBM is laid out, by which
// collectives go. Paths and host memory are each rank's own. Throws kInvalidArgument on every rank, naming what differs
// and which rank has it.
void refuse_different_ranks(Agreement& agreement, const Config& config, const ModelDescription& model, const Plan& plan,
                            const EngineOptions& options);

// Each rank reads its snapshot itself, and copies of another time on another host would be mixed. Throws
// kInvalidArgument on every rank, with both steps, where one has another snapshot than rank 0.
void refuse_different_snapshots(Agreement& agreement, const SnapshotReader& snapshot);

}  // namespace spillway
