// The NUMA nodes of this machine as far as this process may use them: their CPUs and cores, and memory placed on them.
// The one place that sees hwloc. Nothing here fails a run: without an answer from hwloc the machine is one node, and
// memory that the system does not place where it was asked to lies where the system likes; a log line says so.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace spillway {

// CPUs and the memory nearest to them. Memory without CPUs of its own (CXL, HBM beside DRAM) makes no node; CPUs
// without memory, or whose memory this process may not use, belong to the node nearest to them.
struct CpuNode {
  unsigned os_index = 0;       // of the memory
  unsigned cores = 0;          // physical ones with at least one of `cpus`
  std::vector<unsigned> cpus;  // that this process may use, as the system numbers them, ascending
  std::vector<std::vector<unsigned>> cpus_of_cores = {};  // the same, core by core
};

// By the affinity mask of the calling thread and the cpuset of its cgroup. At least one node.
std::vector<CpuNode> usable_nodes();

// The same for a machine that a line describes ("node:2 core:4 pu:2", hwloc_topology_set_synthetic(3)) and a process
// that may use these of its CPUs and of its nodes' memory; empty: all. Throws Error when hwloc does not understand it.
std::vector<CpuNode> described_nodes(const std::string& machine, std::span<const unsigned> cpus = {},
                                     std::span<const unsigned> memories = {});

// Whole pages, not touched yet.
struct NodeMemory {
  std::span<std::byte> memory;
  unsigned os_index = 0;
};

// Asks for pages of these nodes, or of others when they are full. False when it was refused, which is logged once.
bool place_on_nodes(std::span<const NodeMemory> ranges);

}  // namespace spillway
