#include "src/plan/network_traffic.h"

#include "kernels/norm.h"
#include "spillway/communicator.h"
#include "spillway/units.h"

namespace spillway {

BlockNetwork network_of(const Plan& plan, std::uint32_t b) {
  BlockNetwork network;
  if (plan.rank.count == 1) return network;
  const BlockPlan& block = plan.blocks[b];
  const std::uint64_t element = size_of(plan.tile_places[0].shape.type);
  const auto add = [](Collectives& to, std::uint64_t bytes) {
    to.bytes += bytes;
    ++to.calls;
  };
  for (std::size_t s = 0; s < block.shares.size(); ++s) {
    const std::uint64_t others = block.partition.sections[s].elements - block.shares[s].own.count;
    add(network.weights, others * element);
    if (!block.shares[s].trainable) continue;
    add(network.sums, others * sizeof(float));
    add(network.leaves, others / kNormLeaf * sizeof(double));
  }
  if (network.sums.calls == 0) return network;
  // Which parameters had a gradient: a bit each, of all ranks.
  const std::size_t words = div_up(block.partition.parameters.size(), std::size_t{64});
  network.leaves.calls += div_up(words, kMostScalars);
  return network;
}

}  // namespace spillway
