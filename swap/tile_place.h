// Where a tile's bytes are at home between updates, and by which route they get from there into host memory. Decided by
// the plan, fixed for a run; TileMover (tile_mover.h) goes these routes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "spillway/placement.h"
#include "swap/extents.h"

namespace spillway {

// None: with the caller, from where it only passes through a buffer, which whoever updates the tile fills and empties.
using Home = std::optional<Placement>;

// How a part gets from its home into a buffer in host memory, and back.
struct Route {
  bool read = false;    // by the store: read, and written when that is due
  bool copied = false;  // by the device
};
inline constexpr Route kRoutes[] = {/*kHbm*/ {.copied = true}, /*kHost: it is there*/ {}, /*kNvme*/ {.read = true}};
constexpr Route route_of(Home home) { return home ? kRoutes[static_cast<std::size_t>(*home)] : Route{}; }

struct TilePlace {
  TileShape shape;
  Home home[kParts] = {Placement::kNvme, Placement::kNvme};
  std::uint64_t offset[kParts] = {};  // in the arena of the home; unused on NVMe
  // Offset in HBM of a second copy of the weights, for compute, when their home is elsewhere.
  std::optional<std::uint64_t> hbm_weights = std::nullopt;
};

// Whether any of the tile lives in memory.
constexpr bool resident(const TilePlace& tile) {
  return tile.home[0] != Placement::kNvme || tile.home[1] != Placement::kNvme || tile.hbm_weights;
}

// Whether all of the tile is in host memory, where an update works on it.
constexpr bool in_place(const TilePlace& tile) {
  return tile.home[0] == Placement::kHost && tile.home[1] == Placement::kHost;
}

// True when the part's slot is written by every update; the others are written when a commit is due. Weights kept in
// host memory beside states on NVMe are a cache: they travel with the states, so that a commit costs nothing extra. Of
// the caller's weights nobody could ask for them later.
constexpr bool written_by_update(const TilePlace& place, Part part) {
  if (!place.shape.trainable) return false;
  return place.home[index_of(part)] == Placement::kNvme || place.home[index_of(Part::kStates)] == Placement::kNvme ||
         !place.home[index_of(Part::kWeights)];
}

// The padded size of a buffer that any of the tiles fits in.
inline std::uint64_t mover_buffer_bytes(std::span<const TilePlace> tiles) {
  std::uint64_t most = 0;
  for (const TilePlace& tile : tiles) {
    most = std::max(most, extent_bytes(tile.shape, Part::kWeights) + extent_bytes(tile.shape, Part::kStates));
  }
  return most;
}

}  // namespace spillway
