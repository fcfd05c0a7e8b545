// How many compute threads, and on which NUMA nodes.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kernels/topology.h"

namespace spillway {

struct ThreadShare {
  unsigned threads = 1;
  unsigned os_index = 0;       // of the node; of no meaning without CPUs
  std::vector<unsigned> cpus;  // to be bound to; empty: not bound
};

// Of `threads` on these nodes (0: one per core, as far as the CPU quota goes), each node's part in proportion to its
// cores. One share, not bound, when there is one node or when a node would get fewer than two threads. Pure.
std::vector<ThreadShare> share_threads(unsigned threads, std::span<const CpuNode> nodes, std::optional<double> quota);

// The same for this process on this machine.
std::vector<ThreadShare> share_threads(unsigned threads);

// The CPUs of one of `shares` processes that divide these nodes: whole cores, node by node, the same number each or one
// more; of a quota that all of them have together, no more than its part. Where there are fewer cores than processes,
// some have one together. Pure.
std::vector<unsigned> cpus_of_share(std::span<const CpuNode> nodes, unsigned share, unsigned shares,
                                    std::optional<double> quota);

// The nodes as the one of `shares` such processes sees them that has most cores. Pure.
std::vector<CpuNode> nodes_of_largest_share(std::span<const CpuNode> nodes, unsigned shares,
                                            std::optional<double> quota);

// As share_threads(threads), in that process, where so many divide this machine.
std::vector<ThreadShare> share_threads_among(unsigned processes, unsigned threads);

// All of them together.
unsigned threads_of(std::span<const ThreadShare> shares);

}  // namespace spillway
