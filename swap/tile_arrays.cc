#include "swap/tile_arrays.h"

#include "spillway/error.h"

namespace spillway {

namespace {

template <typename T>
void put(T*& pointer, std::byte* at) {
  pointer = reinterpret_cast<T*>(at);
}

// The form that an array of moments has.
MomentFormat format_of(const StateArray& array) {
  if (array.type == "fp32") return MomentFormat::kFloat32;
  if (array.type == "bf16") return MomentFormat::kBFloat16;
  const bool byte = array.type == (array.name == kExpAvg ? "int8" : "uint8");
  SPILLWAY_CHECK(byte && array.group == kMomentGroup && array.scale == "bf16", "the kernels know the states' form");
  return MomentFormat::kInt8;
}

// `states`: of the tile.
void put_moment(OptimizerTile& tile, const StateArray& array, std::byte* states) {
  const bool average = array.name == kExpAvg;
  std::byte* const values = states + array.offset;
  tile.reduced.format = format_of(array);
  if (tile.reduced.format == MomentFormat::kFloat32) return put(average ? tile.exp_avg : tile.exp_avg_sq, values);
  (average ? tile.reduced.exp_avg : tile.reduced.exp_avg_sq) = values;
  if (tile.reduced.format == MomentFormat::kBFloat16) return;
  put(average ? tile.reduced.exp_avg_scales : tile.reduced.exp_avg_sq_scales, states + array.scales);
}

}  // namespace

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient) {
  OptimizerTile tile;
  tile.type = shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (std::byte* const states = memory.part[index_of(Part::kStates)]) {
    for (const StateArray& array : state_arrays(shape)) {
      if (array.name == kExpAvg || array.name == kExpAvgSq) put_moment(tile, array, states);
      if (array.name == kResidual) put(tile.residual, states + array.offset);
      if (array.name == kMaster) put(tile.master, states + array.offset);
    }
  }
  tile.reduced.index = shape.index;
  tile.gradient = gradient;
  tile.count = shape.count;
  return tile;
}

}  // namespace spillway
