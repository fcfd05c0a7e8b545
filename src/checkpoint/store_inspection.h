// How a store is looked at without the run that made it: its description gives the plan back that its layout follows
// from. The functions of spillway/store.h are here.
#pragma once

#include <filesystem>
#include <vector>

#include "spillway/store.h"
#include "src/plan/description.h"
#include "src/plan/plan.h"
#include "swap/store_files.h"

namespace spillway {

// What a store says it is a store of, checked against the room that it has: what is made of it is bounded by the files.
// Throws kCorrupt, kInvalidArgument (an impossible shape).
StoredModel read_stored_model(const StoreFiles& files);
// The plan of a run that has all of the store's tiles on NVMe.
Plan plan_of_store(const StoredModel& stored, const std::vector<std::filesystem::path>& paths);

}  // namespace spillway
