#include "swap/tile_arrays.h"

namespace spillway {

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient) {
  OptimizerTile tile;
  tile.type = shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (std::byte* const states = memory.part[index_of(Part::kStates)]) {
    for (const StateArray& array : state_arrays(shape)) {
      std::byte* const at = states + array.offset;
      if (array.name == kExpAvg) tile.exp_avg = reinterpret_cast<float*>(at);
      if (array.name == kExpAvgSq) tile.exp_avg_sq = reinterpret_cast<float*>(at);
      if (array.name == kResidual) tile.residual = reinterpret_cast<std::int16_t*>(at);
      if (array.name == kMaster) tile.master = reinterpret_cast<float*>(at);
    }
  }
  tile.gradient = gradient;
  tile.count = shape.count;
  return tile;
}

}  // namespace spillway
