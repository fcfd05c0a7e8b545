// A trainable tile as the optimizer sees it: where its arrays lie in the bytes that a mover brings.
#pragma once

#include <cstddef>

#include "spillway/optimizer.h"
#include "swap/tile_mover.h"

namespace spillway {

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient);

}  // namespace spillway
