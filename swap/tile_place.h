// Where a tile's bytes are at home between updates. Decided by the plan, fixed for a run.
#pragma once

#include <cstdint>
#include <optional>

#include "swap/extents.h"

namespace spillway {

// kCaller: of weights that only pass through a buffer, which whoever updates the tile fills and empties.
enum class Home : std::uint8_t { kHbm, kHost, kNvme, kCaller };

struct TilePlace {
  TileShape shape;
  Home home[kParts] = {Home::kNvme, Home::kNvme};
  std::uint64_t offset[kParts] = {};  // in the arena of the home; unused on NVMe
  // Offset in HBM of a second copy of the weights, for compute, when their home is elsewhere.
  std::optional<std::uint64_t> hbm_weights = std::nullopt;
};

// True when the part's slot is written by every update; the others are written when a commit is due. Weights kept in
// host memory beside states on NVMe are a cache: they travel with the states, so that a commit costs nothing extra. Of
// the caller's weights nobody could ask for them later.
constexpr bool written_by_update(const TilePlace& place, Part part) {
  if (!place.shape.trainable) return false;
  return place.home[index_of(part)] == Home::kNvme || place.home[index_of(Part::kStates)] == Home::kNvme ||
         place.home[index_of(Part::kWeights)] == Home::kCaller;
}

}  // namespace spillway
