// Refuses ranks that are not of one run before anything of it is made.
#pragma once

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "src/comm/agreement.h"
#include "src/plan/plan.h"

namespace spillway {

// What must be the same on all ranks: version, model, what a step computes, and how HBM is laid out, by which
// collectives go. Paths and host memory are each rank's own. Throws kInvalidArgument on every rank, naming what differs
// and which rank has it.
void refuse_different_ranks(Agreement& agreement, const Config& config, const ModelDescription& model, const Plan& plan,
                            const EngineOptions& options);

}  // namespace spillway
