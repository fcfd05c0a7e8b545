// What a run tells its user before the first step: text alone, out of the configuration, the plan and what was granted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/engine/run_resources.h"
#include "src/plan/plan.h"

namespace spillway {

// One fact a line: device, parameter groups, homes, gradients, I/O engine, store. commit_every: nothing while it is to
// be chosen yet. nodes: of the plan.
std::vector<std::string> run_summary(const Config& config, const Plan& plan, const ModelDescription& model,
                                     const RunResources& resources, std::optional<std::uint32_t> commit_every,
                                     unsigned nodes);

}  // namespace spillway
