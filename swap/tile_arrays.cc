#include "swap/tile_arrays.h"

namespace spillway {

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient) {
  const StateOffsets at = state_offsets(shape);
  std::byte* states = memory.part[index_of(Part::kStates)];
  OptimizerTile tile;
  tile.type = shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (tile.type == DType::kBFloat16) tile.residual = reinterpret_cast<std::int16_t*>(states + at.master);
  if (tile.type == DType::kFloat16) tile.master = reinterpret_cast<float*>(states + at.master);
  if (has_exp_avg(shape.optimizer)) tile.exp_avg = reinterpret_cast<float*>(states + at.exp_avg);
  if (has_exp_avg_sq(shape.optimizer)) tile.exp_avg_sq = reinterpret_cast<float*>(states + at.exp_avg_sq);
  tile.gradient = gradient;
  tile.count = shape.count;
  return tile;
}

}  // namespace spillway
