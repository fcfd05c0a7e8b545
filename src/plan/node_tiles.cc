#include "src/plan/node_tiles.h"

#include <algorithm>

namespace spillway {
namespace {

// A place of its own costs the kernel a mapping, of which a process has 65,530 (vm.max_map_count), and a huge page at
// its end. So large models go to the nodes in runs of tiles.
constexpr std::uint64_t kMostRuns = 1'024;  // of each node

}  // namespace

unsigned updating_nodes(const Plan& plan, unsigned nodes) {
  return plan.gradients_in_hbm || plan.host.buffers_count % nodes != 0 ? 1 : nodes;
}

std::vector<std::uint32_t> update_order(const Plan& plan, unsigned nodes) {
  std::vector<std::uint32_t> tiles, order;
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) {
    if (plan.tiles[t].range.trainable) tiles.push_back(t);
  }
  const std::uint64_t run = div_up(std::uint64_t{tiles.size()}, nodes * kMostRuns);
  for (std::uint64_t first = 0; first < tiles.size(); first += nodes * run) {
    // A run for each node; at the end of the tiles, runs that differ by one tile at most.
    const std::uint64_t count = std::min<std::uint64_t>(nodes * run, tiles.size() - first);
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t node = i % nodes;
      order.push_back(tiles[first + node * (count / nodes) + std::min(node, count % nodes) + i / nodes]);
    }
  }
  return order;
}

std::vector<NodeRegion> node_regions(const Plan& plan, unsigned nodes, std::uint64_t page_bytes) {
  std::vector<NodeRegion> parts;
  for (std::uint32_t b = 0; b < plan.host.buffers_count; ++b) {
    parts.push_back({{plan.host.buffers.offset + b * plan.host.buffer_bytes, plan.host.buffer_bytes}, b % nodes});
  }
  const std::vector<std::uint32_t> order = update_order(plan, nodes);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto node = static_cast<unsigned>(i % nodes);
    const TilePlan& tile = plan.tiles[order[i]];
    const TilePlace& place = plan.tile_places[order[i]];
    const std::uint64_t element = size_of(place.shape.type);
    if (plan.blocks[tile.block].gradient_home == Placement::kHost) {
      const std::uint64_t gradients = plan.blocks[tile.block].gradient.offset;
      parts.push_back({{gradients + tile.gradient_first * element, tile.range.count * element}, node});
    }
    for (Part part : {Part::kWeights, Part::kStates}) {
      if (place.home[index_of(part)] != Placement::kHost) continue;
      parts.push_back({{place.offset[index_of(part)], extent_bytes(place.shape, part)}, node});
    }
  }
  std::ranges::sort(parts, {}, [](const NodeRegion& part) { return part.region.offset; });

  const std::uint64_t arena = plan.ledger.total(Placement::kHost);
  std::vector<NodeRegion> regions;
  for (const NodeRegion& part : parts) {
    const std::uint64_t begin = align_up(part.region.offset, page_bytes);
    const std::uint64_t end = std::min(align_up(part.region.offset + part.region.bytes, page_bytes), arena);
    if (begin >= end) continue;
    if (!regions.empty()) {
      NodeRegion& last = regions.back();
      if (last.node == part.node && last.region.offset + last.region.bytes == begin) {
        last.region.bytes += end - begin;
        continue;
      }
    }
    regions.push_back({{begin, end - begin}, part.node});
  }
  return regions;
}

}  // namespace spillway
