#include "kernels/thread_shares.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "kernels/process_limits.h"

namespace spillway {
namespace {

constexpr unsigned kLeastOnANode = 2;  // an arena of one would not do (workers.cc), and few threads need no nodes

// A quota that is no whole number is rounded down: one thread too many makes the kernel stop all of them for the rest
// of each period.
unsigned default_threads(unsigned cores, std::optional<double> quota) {
  return std::max(1u, quota && *quota < cores ? static_cast<unsigned>(*quota) : cores);
}

}  // namespace

std::vector<ThreadShare> share_threads(unsigned threads, std::span<const CpuNode> nodes, std::optional<double> quota) {
  unsigned cores = 0;
  for (const CpuNode& node : nodes) cores += node.cores;
  if (threads == 0) threads = default_threads(cores, quota);
  std::vector<ThreadShare> shares;
  // Rounding the sums up to each node, and not the parts, leaves no thread over.
  const auto threads_of = [&](unsigned first_cores) {
    return static_cast<unsigned>((std::uint64_t{threads} * first_cores + cores / 2) / cores);
  };
  unsigned before = 0;
  for (const CpuNode& node : nodes) {
    const unsigned share = threads_of(before + node.cores) - threads_of(before);
    before += node.cores;
    if (nodes.size() == 1 || share < kLeastOnANode) return {{.threads = threads, .os_index = 0, .cpus = {}}};
    shares.push_back({share, node.os_index, node.cpus});
  }
  return shares;
}

std::vector<ThreadShare> share_threads(unsigned threads) { return share_threads(threads, usable_nodes(), cpu_quota()); }

std::vector<unsigned> cpus_of_share(std::span<const CpuNode> nodes, unsigned share, unsigned shares,
                                    std::optional<double> quota) {
  std::vector<std::vector<unsigned>> cores;
  for (const CpuNode& node : nodes) cores.insert(cores.end(), node.cpus_of_cores.begin(), node.cpus_of_cores.end());
  const std::size_t first = share * cores.size() / shares;
  std::size_t count = std::max<std::size_t>(1, (share + std::size_t{1}) * cores.size() / shares - first);
  if (quota) count = std::min<std::size_t>(count, std::max(1u, static_cast<unsigned>(*quota / shares)));
  std::vector<unsigned> cpus;
  for (std::size_t core = first; core < first + count; ++core) {
    cpus.insert(cpus.end(), cores[core].begin(), cores[core].end());
  }
  std::ranges::sort(cpus);
  return cpus;
}

std::vector<CpuNode> nodes_of_largest_share(std::span<const CpuNode> nodes, unsigned shares,
                                            std::optional<double> quota) {
  std::vector<CpuNode> largest;
  unsigned most = 0;
  for (unsigned share = 0; share < shares; ++share) {
    const std::vector<unsigned> cpus = cpus_of_share(nodes, share, shares, quota);
    std::vector<CpuNode> seen;
    unsigned cores = 0;
    for (const CpuNode& node : nodes) {
      CpuNode part{.os_index = node.os_index, .cores = 0, .cpus = {}};
      for (const auto& core : node.cpus_of_cores) {
        if (std::ranges::binary_search(cpus, core.front())) part.cpus_of_cores.push_back(core);
      }
      part.cores = static_cast<unsigned>(part.cpus_of_cores.size());
      std::ranges::set_intersection(node.cpus, cpus, std::back_inserter(part.cpus));
      cores += part.cores;
      if (part.cores > 0) seen.push_back(std::move(part));
    }
    if (cores > most) largest = std::move(seen), most = cores;
  }
  return largest;
}

std::vector<ThreadShare> share_threads_among(unsigned processes, unsigned threads) {
  const std::optional<double> quota = cpu_quota();
  const std::vector<CpuNode> nodes = usable_nodes();
  return share_threads(threads, processes > 1 ? nodes_of_largest_share(nodes, processes, quota) : nodes, quota);
}

unsigned threads_of(std::span<const ThreadShare> shares) {
  unsigned threads = 0;
  for (const ThreadShare& share : shares) threads += share.threads;
  return threads;
}

}  // namespace spillway
