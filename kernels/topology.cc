#include "kernels/topology.h"

#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "kernels/process_limits.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

using Topology = std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)>;

Topology new_topology() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) topology = nullptr;
  return {topology, hwloc_topology_destroy};
}

// Null when hwloc cannot tell, or was told (HWLOC_XMLFILE, HWLOC_SYNTHETIC) to speak of another machine.
Topology this_machine() {
  Topology topology = new_topology();
  // Some of hwloc's ways to look at a machine move the calling thread from CPU to CPU; Linux answers without them.
  const bool known = topology &&
                     hwloc_topology_set_flags(topology.get(), HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING) == 0 &&
                     hwloc_topology_load(topology.get()) == 0 && hwloc_topology_is_thissystem(topology.get());
  if (!known) topology.reset();
  return topology;
}

class Bitmap {
 public:
  Bitmap() : bits_(hwloc_bitmap_alloc(), hwloc_bitmap_free) { SPILLWAY_CHECK(bits_ != nullptr, "out of memory"); }
  explicit Bitmap(std::span<const unsigned> members) : Bitmap() {
    for (unsigned member : members) hwloc_bitmap_set(get(), member);
  }
  explicit Bitmap(hwloc_const_bitmap_t copied) : Bitmap() { hwloc_bitmap_copy(get(), copied); }

  hwloc_bitmap_t get() const { return bits_.get(); }
  bool empty() const { return hwloc_bitmap_iszero(get()) != 0; }
  std::vector<unsigned> members() const {
    std::vector<unsigned> all;
    for (int i = hwloc_bitmap_first(get()); i >= 0; i = hwloc_bitmap_next(get(), i)) {
      all.push_back(static_cast<unsigned>(i));
    }
    return all;
  }

 private:
  std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)> bits_;
};

// Several nodes may be near the same CPUs: DRAM and HBM of a socket, and with them CXL memory that is near all. CPUs
// take the node that is near the fewest others, and of those the first: systems number DRAM before the rest.
std::vector<hwloc_obj_t> by_nearness(hwloc_topology_t topology) {
  std::vector<hwloc_obj_t> memories, filled;
  for (hwloc_obj_t node = nullptr; (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node));) {
    memories.push_back(node);
    if (node->attr->numanode.local_memory > 0) filled.push_back(node);
  }
  if (!filled.empty()) memories = std::move(filled);  // else their sizes are not known
  std::ranges::sort(memories, {},
                    [](hwloc_obj_t node) { return std::pair(hwloc_bitmap_weight(node->cpuset), node->os_index); });
  return memories;
}

struct Claim {
  unsigned os_index;
  Bitmap cpus;
};

// The nodes that share the smallest part of the machine with the CPU; of several, the one with the fewest CPUs.
Claim& nearest(std::vector<Claim>& claims, hwloc_obj_t cpu) {
  for (hwloc_obj_t part = cpu; part != nullptr; part = part->parent) {
    Claim* best = nullptr;
    for (Claim& claim : claims) {
      if (!hwloc_bitmap_intersects(part->cpuset, claim.cpus.get())) continue;
      const auto weight = [](const Claim& of) { return hwloc_bitmap_weight(of.cpus.get()); };
      if (best == nullptr || weight(claim) < weight(*best)) best = &claim;
    }
    if (best != nullptr) return *best;
  }
  return claims.front();
}

std::vector<std::vector<unsigned>> cores_in(hwloc_topology_t topology, const Bitmap& cpus) {
  std::vector<std::vector<unsigned>> cores;
  for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core));) {
    Bitmap of_core(core->cpuset);
    hwloc_bitmap_and(of_core.get(), of_core.get(), cpus.get());
    if (!of_core.empty()) cores.push_back(of_core.members());
  }
  // Some virtual machines show CPUs and no cores.
  if (cores.empty()) {
    for (const unsigned cpu : cpus.members()) cores.push_back({cpu});
  }
  return cores;
}

// Empty when the topology knows none of the allowed CPUs.
std::vector<CpuNode> nodes_of(hwloc_topology_t topology, const Bitmap& allowed) {
  Bitmap left(hwloc_topology_get_allowed_cpuset(topology));
  hwloc_bitmap_and(left.get(), left.get(), allowed.get());
  std::vector<Claim> claims;
  for (hwloc_obj_t memory : by_nearness(topology)) {
    Claim claim{memory->os_index, Bitmap(memory->cpuset)};
    hwloc_bitmap_and(claim.cpus.get(), claim.cpus.get(), left.get());
    if (claim.cpus.empty()) continue;
    hwloc_bitmap_andnot(left.get(), left.get(), claim.cpus.get());
    claims.push_back(std::move(claim));
  }
  if (claims.empty() && !left.empty()) claims.push_back({0, std::exchange(left, Bitmap())});
  for (unsigned cpu : left.members()) {
    Claim& claim = nearest(claims, hwloc_get_pu_obj_by_os_index(topology, cpu));
    hwloc_bitmap_set(claim.cpus.get(), cpu);
  }
  std::ranges::sort(claims, {}, &Claim::os_index);
  std::vector<CpuNode> nodes;
  for (const Claim& claim : claims) {
    std::vector<std::vector<unsigned>> cores = cores_in(topology, claim.cpus);
    nodes.push_back({claim.os_index, static_cast<unsigned>(cores.size()), claim.cpus.members(), std::move(cores)});
  }
  return nodes;
}

}  // namespace

std::vector<CpuNode> usable_nodes() {
  const std::vector<unsigned> allowed = affinity_cpus();
  std::vector<CpuNode> nodes;
  if (const Topology topology = this_machine()) nodes = nodes_of(topology.get(), Bitmap(allowed));
  if (nodes.empty()) {
    log(LogLevel::kWarning, "hwloc does not know this machine: taking it for one NUMA node, and each CPU for a core");
    nodes.push_back({0, static_cast<unsigned>(allowed.size()), allowed});
    for (const unsigned cpu : allowed) nodes.back().cpus_of_cores.push_back({cpu});
  }
  return nodes;
}

std::vector<CpuNode> described_nodes(const std::string& machine, std::span<const unsigned> cpus,
                                     std::span<const unsigned> memories) {
  const Topology topology = new_topology();
  if (!topology || hwloc_topology_set_synthetic(topology.get(), machine.c_str()) != 0 ||
      hwloc_topology_load(topology.get()) != 0) {
    throw Error(Code::kInvalidArgument, {machine, "describes no machine", 0, "see hwloc_topology_set_synthetic(3)"});
  }
  if (!memories.empty()) hwloc_topology_restrict(topology.get(), Bitmap(memories).get(), HWLOC_RESTRICT_FLAG_BYNODESET);
  return nodes_of(topology.get(),
                  cpus.empty() ? Bitmap(hwloc_topology_get_topology_cpuset(topology.get())) : Bitmap(cpus));
}

bool place_on_nodes(std::span<const NodeMemory> ranges) {
  const Topology topology = this_machine();
  int error = topology ? 0 : ENOSYS;
  for (const NodeMemory& range : ranges) {
    if (error != 0) break;
    // Not strict: a node that is full must not end the process, as MPOL_BIND would.
    if (hwloc_set_area_membind(topology.get(), range.memory.data(), range.memory.size(),
                               Bitmap({&range.os_index, 1}).get(), HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET) != 0) {
      error = errno;
    }
  }
  if (error == 0) return true;
  log(LogLevel::kWarning, fmt::format("cannot place memory on NUMA nodes ({}): updates reach into memory of other "
                                      "nodes, at the rate of the link between them",
                                      std::generic_category().message(error)));
  return false;
}

}  // namespace spillway
