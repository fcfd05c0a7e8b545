#include "src/plan/network_traffic.h"

#include "kernels/norm.h"
#include "spillway/communicator.h"
#include "spillway/units.h"

namespace spillway {

BlockNetwork network_of(const Plan& plan, std::uint32_t b) {
  BlockNetwork network;
  if (plan.peers.count == 1) return network;
  const bool parted = plan.rank.count > 1;
  const BlockPlan& block = plan.blocks[b];
  const std::uint64_t element = size_of(plan.tile_places[0].shape.type);
  const auto add = [](Collectives& to, std::uint64_t bytes) { to += {.bytes = bytes, .calls = 1}; };
  for (const Section& section : block.partition.sections) {
    const std::uint64_t others = section.elements - shard_of(section.first, section.elements, plan.peers).count;
    if (parted) add(network.weights, others * element);
    if (!section.trainable) continue;
    add(network.sums, others * size_of(plan.wire));
    if (parted) {
      add(network.leaves, others / kNormLeaf * sizeof(double));
    } else {
      add(network.rounded, others * element);
    }
  }
  if (network.sums.calls == 0) return network;
  // Which parameters had a gradient: a bit each, of all ranks.
  const std::size_t words = div_up(block.partition.parameters.size(), std::size_t{64});
  network.leaves.calls += div_up(words, kMostScalars);
  return network;
}

}  // namespace spillway
