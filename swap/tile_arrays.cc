#include "swap/tile_arrays.h"

#include <type_traits>

#include "spillway/error.h"

namespace spillway {

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient) {
  OptimizerTile tile;
  tile.type = shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (std::byte* const states = memory.part[index_of(Part::kStates)]) {
    for (const StateArray& array : state_arrays(shape)) {
      const auto put = [&](auto*& pointer, std::string_view type) {
        SPILLWAY_CHECK(array.type == type, "the kernels compute with exact states");
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(states + array.offset);
      };
      if (array.name == kExpAvg) put(tile.exp_avg, "fp32");
      if (array.name == kExpAvgSq) put(tile.exp_avg_sq, "fp32");
      if (array.name == kResidual) put(tile.residual, "int16");
      if (array.name == kMaster) put(tile.master, "fp32");
    }
  }
  tile.gradient = gradient;
  tile.count = shape.count;
  return tile;
}

}  // namespace spillway
