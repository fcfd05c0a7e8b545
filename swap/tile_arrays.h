// A tile as the optimizer sees it: where its arrays lie in the bytes that a mover brings.
#pragma once

#include <cstddef>

#include "spillway/optimizer.h"
#include "swap/tile_mover.h"

namespace spillway {

// Null: what the tile, or the memory, does not have.
OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient);

}  // namespace spillway
