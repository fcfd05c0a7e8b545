// What a run would take and how fast it would be: the engine's own plan and schedule, with rates that need no run.
#pragma once

#include <cstdint>

#include "spillway/config.h"
#include "src/plan/plan.h"
#include "src/plan/schedule.h"
#include "tools/plan/description.h"
#include "tools/plan/rates.h"

namespace spillway::planning {

// A step in the long run: the usual one and the one that is committed, in their proportion.
struct StepInfo {
  double seconds = 0;
  ScheduleTraffic traffic;
};

struct Prediction {
  Plan plan;
  StepInfo step;
  Schedule schedule;               // of a usual step
  std::uint32_t commit_every = 0;  // steps; 0: no commits, or no store
  double commit_seconds = 0;       // that a commit adds to its step
  std::uint32_t speculative = 0;   // blocks that are updated inside backward while clipping has no effect
  StepInfo clipped;                // a step in which it has one; as `step` where nothing is speculative
  std::uint64_t joined = 1;        // tiles that are one in the schedule: of very large models
  std::uint64_t visits_recomputed = 0, visits_with_insides = 0;  // blocks whose backward computes forward once more
};

// How much time the schedule may take.
struct Effort {
  std::uint64_t most_tiles = 4000;     // in the schedule; more are joined
  std::uint64_t choosing_tiles = 800;  // in those that choose how many blocks are speculative
  std::uint32_t tries = 32;            // of them
};

// `nodes`: NUMA nodes of the machine. Of several ranks the first is planned, which has most. Throws what make_plan
// throws.
Prediction predict(const Config& config, const DescribedModel& described, const Rates& rates, unsigned nodes,
                   const Effort& effort = {}, std::uint32_t ranks = 1);

// The same schedule with fewer tiles: of each block's that move alike so many, one after the other, are one that at
// most about `most` are left. Returns how many were joined at most. What overlaps within them is lost, which is little
// where a block has many.
std::uint64_t join_tiles(ScheduleInput& input, std::uint64_t most);

}  // namespace spillway::planning
