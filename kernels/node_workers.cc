#include "kernels/node_workers.h"

#include <fmt/format.h>

#include <optional>

#include "kernels/arena_loop.h"
#include "kernels/float_environment.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {

// The body that the calling thread is in. An observer of the arena would bind threads as they come and go, but a thread
// that is still in the arena when the observer goes keeps the binding, and oneTBB lends it to the host program next. So
// each range of a loop binds and gives back, for 1 µs.
struct NodeWorkers::Inside {
  Inside(const NodeWorkers& workers, Node& node) : before_(current_) {
    if (current_.node != &node) binding_.emplace(node.cpus);
    current_ = {&workers, &node};
  }
  ~Inside() { current_ = before_; }

  struct Current {
    const NodeWorkers* workers = nullptr;
    Node* node = nullptr;
  };
  static Node* of(const NodeWorkers* workers) { return current_.workers == workers ? current_.node : nullptr; }

 private:
  static thread_local Current current_;
  Current before_;
  std::optional<ThreadBinding> binding_;
};
thread_local NodeWorkers::Inside::Current NodeWorkers::Inside::current_;

// A call, and what of it each node runs.
struct NodeWorkers::Call {
  IndexBody body;
  std::size_t count, nodes;
  bool one_each;

  std::size_t first(std::size_t node, const NodeWorkers& workers) const {
    if (one_each) return node;
    if (node == nodes) return count;
    // Not count * slot / slots: `count` is any number.
    const std::size_t slot = workers.nodes_[node]->first_slot, slots = workers.threads_;
    return count / slots * slot + count % slots * slot / slots;
  }
};

NodeWorkers::NodeWorkers(std::span<const ThreadShare> shares) {
  for (const ThreadShare& share : shares) {
    SPILLWAY_CHECK(share.threads >= 2, "an arena of one would run two bodies at one time");
    threads_ += share.threads;
  }
  unsigned first = 0;
  for (const ThreadShare& share : shares) {
    // Callers work in the last arena and help in the others, which must do without them until then.
    const unsigned for_callers = &share == &shares.back() ? 1 : 0;
    nodes_.emplace_back(
        new Node{first, share.threads, CpuMask(share.cpus),
                 TbbArena({.threads = share.threads, .for_callers = for_callers, .process_threads = threads_})});
    first += share.threads;
    if (ThreadBinding(nodes_.back()->cpus).bound()) continue;
    log(LogLevel::kWarning, fmt::format("cannot bind threads to the CPUs of NUMA node {}: they may compute far from "
                                        "their memory, at the rate of the link between nodes",
                                        share.os_index));
  }
}

unsigned NodeWorkers::current_slot() const noexcept {
  const Node* node = Inside::of(this);
  const int slot = TbbArena::current_slot();
  SPILLWAY_CHECK(node != nullptr && slot >= 0 && static_cast<unsigned>(slot) < node->threads,
                 "current_slot() belongs inside a body");
  return node->first_slot + static_cast<unsigned>(slot);
}

auto NodeWorkers::loop_on(Node& node, std::size_t first, IndexBody body) {
  return [this, &node, first, body](std::size_t begin, std::size_t end) {
    const Inside inside(*this, node);
    const DefaultFloatEnvironment environment;
    for (std::size_t i = begin; i != end; ++i) body(first + i);
  };
}

void NodeWorkers::parallel_for(std::size_t count, IndexBody body) {
  if (count == 0) return;
  Node* node = Inside::of(this);
  if (node == nullptr) return run_from(0, {body, count, nodes_.size(), false});
  ArenaLoop loop(loop_on(*node, 0, body));
  loop.run(node->arena, count);
}

void NodeWorkers::parallel_for_nodes(std::size_t count, IndexBody body) {
  SPILLWAY_CHECK(count <= nodes_.size() && Inside::of(this) == nullptr, "one body for each node, outside of any");
  if (count > 0) run_from(0, {body, count, count, true});
}

// Nodes [n, call.nodes): the last one's part with the calling thread, the others' beside it, a stack frame each.
void NodeWorkers::run_from(std::size_t n, const Call& call) {
  const std::size_t first = call.first(n, *this), count = call.first(n + 1, *this) - first;
  ArenaLoop loop(loop_on(*nodes_[n], first, call.body));
  if (n + 1 == call.nodes) {
    loop.run(nodes_[n]->arena, count);
  } else if (count == 0) {
    run_from(n + 1, call);
  } else {
    loop.run_beside(nodes_[n]->arena, count, [&] { run_from(n + 1, call); });
  }
}

}  // namespace spillway
