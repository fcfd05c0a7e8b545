// How a store is looked at without the run that made it: its description gives the plan back that its layout follows
// from. The functions of spillway/store.h are here.
#pragma once

#include <filesystem>
#include <vector>

#include "spillway/store.h"
#include "src/description.h"
#include "src/plan.h"

namespace spillway {

// The plan of a run that has all of the store's tiles on NVMe.
Plan plan_of_store(const StoredModel& stored, const std::vector<std::filesystem::path>& paths);

}  // namespace spillway
