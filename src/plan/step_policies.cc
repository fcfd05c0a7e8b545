#include "src/plan/step_policies.h"

#include <algorithm>

#include "src/plan/node_tiles.h"
#include "swap/tile_place.h"

namespace spillway {
namespace {

WeightResidencyOptions weights_of(const Plan& plan) {
  WeightResidencyOptions options{.block_bytes = {},
                                 .place_bytes = {},
                                 .owners = plan.hbm.owners,
                                 .reuse_bytes = plan.hbm.reuse_bytes,
                                 .frozen = frozen_blocks(plan),
                                 .prefetch_bytes = plan.hbm.prefetch_bytes,
                                 .at_home = plan.hbm.places.empty()};
  for (const BlockPlan& block : plan.blocks) {
    options.block_bytes.push_back(block.partition.elements * size_of(plan.tile_places[0].shape.type));
  }
  for (const Region& place : plan.hbm.places) options.place_bytes.push_back(place.bytes);
  return options;
}

GradientMemoryOptions gradients_of(const Plan& plan) {
  GradientMemoryOptions options;
  for (const BlockPlan& block : plan.blocks) {
    const DType type = plan.tile_places[0].shape.type;
    options.blocks.push_back({.bytes = block.gradient_elements * size_of(type), .home = block.gradient_home});
  }
  for (const Region& staging : plan.hbm.staging) options.staging_bytes.push_back(staging.bytes);
  for (const Region& passing : plan.host.passing) options.passing_bytes.push_back(passing.bytes);
  return options;
}

UpdateQueueOptions updates_of(const Plan& plan, unsigned nodes) {
  UpdateQueueOptions options{.buffers = std::max(plan.host.buffers_count, 1u),
                             .nodes = updating_nodes(plan, nodes),
                             .reads_ahead = plan.host.reads_ahead,
                             .writes_behind = plan.host.writes_behind,
                             .early_planned = plan.early_blocks};
  options.order = update_order(plan, options.nodes);
  for (const BlockPlan& block : plan.blocks) options.blocks.push_back({block.first_tile, block.tiles});
  for (const TilePlan& tile : plan.tiles) options.trainable.push_back(tile.range.trainable);
  for (const std::uint32_t tile : options.order) {
    if (!resident(plan.tile_places[tile])) options.checked.push_back(tile);
  }
  if (options.nodes > 1) return options;  // a buffer belongs to a node, as each place in the queue does
  for (std::size_t t = 0; t < plan.tiles.size(); ++t) {
    const bool spilled = plan.blocks[plan.tiles[t].block].gradient_home == Placement::kNvme;
    options.in_place.push_back(in_place(plan.tile_places[t]) && !spilled);
  }
  if (std::ranges::count(options.in_place, 1) == 0) options.in_place.clear();
  return options;
}

}  // namespace

StepPolicies step_policies(const Plan& plan, unsigned nodes) {
  return {.weights = weights_of(plan), .gradients = gradients_of(plan), .updates = updates_of(plan, nodes)};
}

}  // namespace spillway
