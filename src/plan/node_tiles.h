// Tiles on a machine with several NUMA nodes: which node updates which, and where its bytes have to lie for that. Pure.
//
// Tile i of the update order belongs to node i mod nodes, and so does buffer i mod nodes: buffers are used in turn, and
// their number is a multiple of the nodes'. Two nodes, four buffers, runs of three tiles:
//
//   tiles    0 1 2 ║ 3 4 5 ║ 6 7 8 ║ 9 …        as they lie in memory: a run on node 0, a run on node 1, …
//   order    0 3 1 4 2 5 ║ 6 9 …                updated at the same time: 0 and 3, 1 and 4, …
//   buffer   0 1 2 3 0 1 ║ 2 3 …
#pragma once

#include <cstdint>
#include <vector>

#include "src/plan/plan.h"

namespace spillway {

// How many tiles are updated at the same time, each by its node's threads: `nodes`, or 1 when there are too few buffers
// for them or the device updates.
unsigned updating_nodes(const Plan& plan, unsigned nodes);

// Trainable tiles; with one node, in the order of the plan.
std::vector<std::uint32_t> update_order(const Plan& plan, unsigned nodes);

struct NodeRegion {
  Region region;  // of the host arena, whole pages
  unsigned node = 0;
};

// Buffers, resident parts and gradients of the trainable tiles, in order and without overlap. A page belongs to what
// its first byte belongs to.
std::vector<NodeRegion> node_regions(const Plan& plan, unsigned nodes, std::uint64_t page_bytes);

}  // namespace spillway
