// Compute threads in groups, each bound to the CPUs of a NUMA node (kernels/workers.h).
//
//   parallel_for(8, …)         node 0: bodies 0 1 2 3 ║ node 1: bodies 4 5 6 7     shared out by threads
//   parallel_for_nodes(2, …)   node 0: body 0         ║ node 1: body 1             at the same time
//                                └─ parallel_for(4, …): node 0 alone
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/tbb_arena.h"
#include "kernels/thread_binding.h"
#include "kernels/thread_shares.h"
#include "spillway/device.h"

namespace spillway {

class NodeWorkers final : public HostWorkers {
 public:
  explicit NodeWorkers(std::span<const ThreadShare> shares);

  unsigned threads() const noexcept override { return threads_; }
  unsigned usable_threads() const noexcept { return nodes_.front()->arena.usable_threads(); }
  unsigned nodes() const noexcept override { return static_cast<unsigned>(nodes_.size()); }
  unsigned current_slot() const noexcept override;
  void parallel_for(std::size_t count, IndexBody body) override;
  void parallel_for_nodes(std::size_t count, IndexBody body) override;

 private:
  struct Node {
    unsigned first_slot, threads;
    CpuMask cpus;
    TbbArena arena;
  };
  struct Inside;
  struct Call;

  auto loop_on(Node& node, std::size_t first, IndexBody body);
  void run_from(std::size_t node, const Call& call);

  unsigned threads_ = 0;
  std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace spillway
