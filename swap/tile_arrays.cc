#include "swap/tile_arrays.h"

#include <algorithm>
#include <cstring>

#include "spillway/error.h"

namespace spillway {

namespace {

template <typename T>
void put(T*& pointer, std::byte* at) {
  pointer = reinterpret_cast<T*>(at);
}

// The form that an array of moments has.
MomentFormat format_of(const StateArray& array) {
  const auto* const format = std::ranges::find_if(kMomentFormats, [&array](MomentFormat known) {
    const StateArray wanted = moment_array(array.name, known);
    return array.type == wanted.type && array.group == wanted.group && array.scale == wanted.scale;
  });
  SPILLWAY_CHECK(format != kMomentFormats.end(), "the kernels know the states' form");
  return *format;
}

// `states`: of the tile.
void put_moment(OptimizerTile& tile, const StateArray& array, std::byte* states) {
  const bool average = array.name == kExpAvg;
  std::byte* const values = states + array.offset;
  tile.reduced.format = format_of(array);
  if (tile.reduced.format == MomentFormat::kFloat32) return put(average ? tile.exp_avg : tile.exp_avg_sq, values);
  (average ? tile.reduced.exp_avg : tile.reduced.exp_avg_sq) = values;
  if (!has_scales(tile.reduced.format)) return;
  put(average ? tile.reduced.exp_avg_scales : tile.reduced.exp_avg_sq_scales, states + array.scales);
}

}  // namespace

OptimizerTile tile_arrays(const TileShape& shape, const TileMemory& memory, const std::byte* gradient) {
  OptimizerTile tile;
  tile.type = shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (std::byte* const states = memory.part[index_of(Part::kStates)]) {
    // The arrays lie one after the other; which there are depends on optimizer, weight type and state format.
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

void copy_elements(const TileShape& from, const TileMemory& source, const TileShape& to, const TileMemory& out,
                   const CopiedElements& elements) {
  SPILLWAY_CHECK(elements.from + elements.count <= from.count && elements.to + elements.count <= to.count,
                 "both tiles have them");
  const auto copy = [&](Part part, std::uint64_t from_offset, std::uint64_t to_offset, std::uint64_t bytes,
                        std::uint64_t group) {
    SPILLWAY_CHECK(elements.from % group == 0 && elements.to % group == 0 && elements.count % group == 0,
                   "no group of elements with one scale is cut");
    std::memcpy(out.part[index_of(part)] + to_offset + elements.to / group * bytes,
                source.part[index_of(part)] + from_offset + elements.from / group * bytes,
                elements.count / group * bytes);
  };
  copy(Part::kWeights, 0, 0, size_of(from.type), 1);
  const StateArrays arrays = state_arrays(from), wanted = state_arrays(to);
  SPILLWAY_CHECK(from.type == to.type && arrays.count == wanted.count, "both tiles are of one kind");
  for (std::size_t a = 0; a < arrays.count; ++a) {
    const StateArray &array = arrays.array[a], &into = wanted.array[a];
    SPILLWAY_CHECK(array.name == into.name && array.bytes == into.bytes && array.group == into.group,
                   "both tiles have the same arrays");
    copy(Part::kStates, array.offset, into.offset, array.bytes, 1);
    if (array.group == 1) continue;
    copy(Part::kStates, array.scales, into.scales, scale_bytes(from, array) / div_up(from.count, array.group),
         array.group);
  }
}

}  // namespace spillway
