// A tile as the optimizer sees it: where its arrays lie in the bytes that a mover brings. Moves and computes nothing;
// which arrays a state format has is listed in extents.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spillway/optimizer.h"
#include "swap/tile_mover.h"

namespace spillway {

// Null: what the tile, or the memory, does not have.
OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient);

// Elements of one tile into another of the same kind, cut otherwise: weights, states and the scales of groups, whose
// bits stay as they are. `from`, `to`: where they begin in either; multiples of every group, as the count is.
struct CopiedElements {
  std::uint64_t from = 0, to = 0, count = 0;
};
void copy_elements(const TileShape& from, const TileMemory& source, const TileShape& to, const TileMemory& out,
                   const CopiedElements& elements);

}  // namespace spillway
