// The layout of a store file: where each tile's slots lie. Pure arithmetic; nothing of it is stored, it is derived
// again from the model, the tile size and the number of slots whenever a store is opened. Which slot counts is said by
// the manifest (manifest.h).
//
//   | superblock | description | manifest A, A', B, B' | tile 0: slot 0 | slot 1 | tile 1: slot 0 | slot 1 | … |
//   scratch |
//                                                        slot: | weights | states |
//
// Every part starts and ends at a multiple of 64 KiB, so that a store can move to a drive with larger sectors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/tile_update.h"
#include "spillway/dtype.h"
#include "spillway/optimizer.h"
#include "spillway/units.h"

namespace spillway {

inline constexpr std::uint64_t kExtentAlignment = 64 * kKiB;

struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;  // padded; the bytes after the payload are zero and belong to the checksum
};

// What of a tile moves on its own: forward and backward read weights, the update needs both.
enum class Part : std::uint8_t { kWeights, kStates };
inline constexpr std::size_t kParts = 2;
constexpr std::size_t index_of(Part part) { return static_cast<std::size_t>(part); }

// One of the arrays that a tile's states consist of, an element for each of the tile's. A store lists them, so that one
// which keeps others is not misread.
struct StateArray {
  std::string_view name, type;
  std::uint64_t bytes = 0;          // of an element
  std::uint64_t offset = 0;         // in the states of a tile
  std::uint64_t group = 1;          // elements that share a scale
  std::string_view scale = "none";  // type of the scales, "bf16" where there are some
  std::uint64_t scales = 0;         // offset of the scales, after all arrays
  bool operator==(const StateArray&) const = default;
};
// Descriptions live as long as the program; their offsets are 0.
using StateList = std::span<const StateArray>;

struct TileShape {
  std::uint64_t count = 0;  // elements, a multiple of 1,024
  DType type = DType::kFloat32;
  bool trainable = true;
  OptimizerKind optimizer = OptimizerKind::kAdam;
  StateList states = {};    // of a trainable tile, at most 3; empty: the exact ones of its type and optimizer
  std::uint64_t index = 0;  // of its first element among those of all blocks: what rounding is keyed by
};

struct StateArrays {
  std::array<StateArray, 3> array;
  std::size_t count = 0;
  const StateArray* begin() const { return array.data(); }
  const StateArray* end() const { return array.data() + count; }
};
// In the order in which they lie, and after them the scales of those that have some, in the same order. The exact
// ones: | exp_avg | exp_avg_sq | master |, of the first two what the optimizer keeps. Master: a bf16 weight's residual,
// an fp16 weight's fp32 master; an fp32 weight is its own. None in a frozen tile.
StateArrays state_arrays(const TileShape& tile);
inline constexpr std::string_view kExpAvg = "exp_avg", kExpAvgSq = "exp_avg_sq";
// Of one that keeps moments in this form.
constexpr StateArray moment_array(std::string_view name, MomentFormat format) {
  StateArray array{.name = name, .type = name_of(format), .bytes = size_of(format)};
  if (format == MomentFormat::kInt8 && name == kExpAvgSq) array.type = "uint8";
  if (has_scales(format)) array.group = kMomentGroup, array.scale = "bf16";
  return array;
}
inline constexpr std::string_view kResidual = "master_residual", kMaster = "master";

ElementBytes element_bytes(const TileShape& tile, Part part);

std::uint64_t scale_bytes(const TileShape& tile, const StateArray& array);
std::uint64_t payload_bytes(const TileShape& tile, Part part);  // arrays and scales
std::uint64_t extent_bytes(const TileShape& tile, Part part);   // payload, padded to kExtentAlignment

struct TileExtents {
  Extent extent[2][kParts];  // [slot][part]; with one slot, [1] equals [0]
};

struct StoreGeometry {
  std::uint64_t description_bytes = 0;  // capacity, padded
  std::uint64_t record_bytes = 0;       // capacity of one manifest record, padded
  std::uint64_t scratch_bytes = 0;      // for bandwidth probes
  std::uint32_t slots = 2;
};

struct StoreLayout {
  std::uint64_t description_offset = 0;
  std::uint64_t record_offset[2][2] = {};  // [record][copy]
  std::vector<TileExtents> tiles;
  std::uint64_t scratch_offset = 0;
  std::uint64_t total_bytes = 0;
};

StoreLayout lay_out_store(std::span<const TileShape> tiles, const StoreGeometry& geometry);

}  // namespace spillway
