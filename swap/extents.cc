#include "swap/extents.h"

#include <algorithm>

namespace spillway {

StateArrays state_arrays(const TileShape& tile) {
  StateArrays arrays;
  if (!tile.trainable) return arrays;
  std::uint64_t offset = 0;
  const auto add = [&](StateArray array) {
    array.offset = offset;
    offset += tile.count * array.bytes;
    arrays.array.at(arrays.count++) = array;
  };
  // Reduced formats come as a list with the tile; without one, the exact states of its type and optimizer follow below.
  for (const StateArray& array : tile.states) add(array);
  for (StateArray& array : std::span(arrays.array).first(arrays.count)) {
    array.scales = offset;
    offset += scale_bytes(tile, array);
  }
  if (!tile.states.empty()) return arrays;
  if (has_exp_avg(tile.optimizer)) add(moment_array(kExpAvg, MomentFormat::kFloat32));
  if (has_exp_avg_sq(tile.optimizer)) add(moment_array(kExpAvgSq, MomentFormat::kFloat32));
  if (tile.type == DType::kBFloat16) add({.name = kResidual, .type = "int16", .bytes = 2});
  if (tile.type == DType::kFloat16) add({.name = kMaster, .type = "fp32", .bytes = 4});
  return arrays;
}

ElementBytes element_bytes(const TileShape& tile, Part part) {
  if (part == Part::kWeights) return {size_of(tile.type)};
  ElementBytes bytes = {};
  std::ranges::transform(state_arrays(tile), bytes.begin(), &StateArray::bytes);
  return bytes;
}

std::uint64_t scale_bytes(const TileShape& tile, const StateArray& array) {
  constexpr std::uint64_t kBytes = 2;
  return array.group > 1 ? div_up(tile.count, array.group) * kBytes : 0;
}

std::uint64_t payload_bytes(const TileShape& tile, Part part) {
  std::uint64_t bytes = 0, scales = 0;
  for (const std::uint64_t element : element_bytes(tile, part)) bytes += element;
  for (const StateArray& array : tile.states) scales += part == Part::kStates ? scale_bytes(tile, array) : 0;
  return tile.count * bytes + scales;
}

std::uint64_t extent_bytes(const TileShape& tile, Part part) {
  return align_up(payload_bytes(tile, part), kExtentAlignment);
}

StoreLayout lay_out_store(std::span<const TileShape> tiles, const StoreGeometry& geometry) {
  StoreLayout layout;
  std::uint64_t offset = kExtentAlignment;  // the superblock
  auto take = [&offset](std::uint64_t bytes) {
    const std::uint64_t at = offset;
    offset += align_up(bytes, kExtentAlignment);
    return at;
  };
  layout.description_offset = take(geometry.description_bytes);
  // Records before tiles, so that a program that does not know the model finds the last commit.
  for (auto& record : layout.record_offset) {
    for (auto& copy : record) copy = take(geometry.record_bytes);
  }
  layout.tiles.resize(tiles.size());
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        Extent& extent = layout.tiles[t].extent[slot][index_of(part)];
        // A tile that is never written needs no second slot.
        const bool own_place = slot == 0 || (geometry.slots == 2 && tiles[t].trainable);
        const std::uint64_t bytes = extent_bytes(tiles[t], part);
        extent = own_place ? Extent{take(bytes), bytes} : layout.tiles[t].extent[0][index_of(part)];
      }
    }
  }
  layout.scratch_offset = take(geometry.scratch_bytes);
  layout.total_bytes = offset;
  return layout;
}

}  // namespace spillway
