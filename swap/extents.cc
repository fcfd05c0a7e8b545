#include "swap/extents.h"

namespace spillway {

StateArrays state_arrays(DType weights, OptimizerKind optimizer) {
  StateArrays arrays;
  const auto add = [&arrays](const StateArray& array) { arrays.array[arrays.count++] = array; };
  if (has_exp_avg(optimizer)) add({.name = "exp_avg", .type = "fp32", .bytes = 4});
  if (has_exp_avg_sq(optimizer)) add({.name = "exp_avg_sq", .type = "fp32", .bytes = 4});
  if (weights == DType::kBFloat16) add({.name = "master_residual", .type = "int16", .bytes = 2});
  if (weights == DType::kFloat16) add({.name = "master", .type = "fp32", .bytes = 4});
  return arrays;
}

std::uint64_t payload_bytes(const TileShape& tile, Part part) {
  if (part == Part::kWeights) return tile.count * size_of(tile.type);
  if (!tile.trainable) return 0;
  std::uint64_t bytes = 0;
  for (const StateArray& array : state_arrays(tile.type, tile.optimizer)) bytes += array.bytes;
  return tile.count * bytes;
}

std::uint64_t extent_bytes(const TileShape& tile, Part part) {
  return align_up(payload_bytes(tile, part), kExtentAlignment);
}

StateOffsets state_offsets(const TileShape& tile) {
  StateOffsets offsets;
  std::uint64_t at = 0;
  for (const StateArray& array : state_arrays(tile.type, tile.optimizer)) {
    (array.name == "exp_avg" ? offsets.exp_avg : array.name == "exp_avg_sq" ? offsets.exp_avg_sq : offsets.master) = at;
    at += tile.count * array.bytes;
  }
  if (tile.type == DType::kFloat32) offsets.master = at;  // none: where the arrays end
  return offsets;
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
