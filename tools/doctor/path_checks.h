// Facts of paths in, findings out. Pure.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/doctor/finding.h"
#include "tools/doctor/need.h"
#include "tools/doctor/path.h"

namespace spillway::doctor {

Findings check_path(const PathFacts& facts, const Need& need);

// NUMA nodes by the system's numbers.
struct NodesInUse {
  std::optional<int> gpu = {};
  std::vector<unsigned> cpus = {};  // of those that this process may use
};

// What concerns all paths together: space for a store that is striped over them, two paths on one drive, drives on
// other NUMA nodes than those that use them.
Findings check_paths(std::span<const PathFacts> paths, const Need& need, const NodesInUse& nodes);

// GB/s of `8.0 GT/s × 4`, in one direction and behind the line's code; nothing when it is not such a text.
std::optional<double> link_gb_per_s(const std::string& link);

}  // namespace spillway::doctor
