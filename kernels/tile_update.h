// The optimizer's update of a tile with the checksums of its two extents, as they came and as they go, in one pass over
// memory: a piece of the tile is hashed, updated and hashed again while it lies in the cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/checksum.h"
#include "spillway/device.h"
#include "spillway/optimizer.h"

namespace spillway {

// Bytes of an element of each array that an extent consists of, one after the other; a 0 ends them. Every array has an
// element for each of the tile's. What lies after them, scales and padding, is hashed on its own.
using ElementBytes = std::array<std::uint64_t, 4>;

// An extent in memory, and room for the checksum of each of its granules before and after; empty: not wanted.
struct ExtentHashes {
  std::span<const std::byte> bytes;
  std::span<std::uint64_t> before, after;
  ElementBytes arrays = {};
};

// A tile of a multiple of so many elements is hashed in the pass that updates it, where its arrays fill whole granules
// then: those of two bytes an element and more, and those of one byte. Any other takes three passes.
inline constexpr std::uint64_t kHashedTileUnit = 128 * 1024, kHashedByteUnit = 256 * 1024;

// Elements from the end of the range before up to `end` take the scalars of `group`, or stay as they are.
struct GroupRange {
  std::uint64_t end = 0;
  std::uint32_t group = 0;
};
inline constexpr std::uint32_t kNotUpdated = UINT32_MAX;  // as a group

struct TileUpdate {
  OptimizerTile tile;                         // its arrays are those of the extents
  std::span<const GroupRange> groups;         // the last one ends at tile.count
  std::span<const OptimizerScalars> scalars;  // by group
  ExtentHashes weights;                       // multiples of 64 KiB; what lies after the payload is hashed as it is
  ExtentHashes states;
  ExtentHashes gradient = {};  // only `before`; starts with tile.gradient
};

// False when a new value is not finite; everything is written and hashed all the same. Whoever has it that `before` is
// wrong must not use what was written.
bool update_tile(const TileUpdate& update, HostWorkers& workers);

}  // namespace spillway
