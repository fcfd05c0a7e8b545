// Tiles of a run through host memory, in order, while the last ones are still being written: all of them for an import,
// those at home in memory for a commit and when a run resumes. Tiles of an update go another way (update_queue.h). One
// thread, the engine's. Errors: the mover's.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>

#include "swap/tile_mover.h"

namespace spillway {

using TileWork = std::function<void(std::uint32_t tile, const TileMemory& memory)>;

// Memory comes as zeros; what the work leaves there goes to the tile's home and slot. What `work` throws ends the walk
// and is returned: the caller's own failure, and none of the mover's. Nothing is under way afterwards.
// `left_out`, unless null: tiles that stay as they are.
std::exception_ptr write_tiles(TileMover& mover, std::uint32_t tiles, const TileWork& work,
                               const std::function<bool(std::uint32_t tile)>& left_out = {});

// For a run that goes on: resident tiles come from their committed slot.
void read_resident_tiles(TileMover& mover, std::span<const TilePlace> tiles);

// For a commit: tiles that updates leave in memory reach their slot.
void write_resident_tiles(TileMover& mover, std::span<const TilePlace> tiles);

}  // namespace spillway
