#include "src/tile_values.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "spillway/bf16.h"

namespace spillway {
namespace {

constexpr std::uint64_t kValuesAtOnce = 64 * 1024;

// Calls piece(parameter, first element of it, offset in the tile, count) for every run of a parameter inside the tile,
// at most kValuesAtOnce long.
template <typename Piece>
void for_each_piece(const Plan& plan, std::uint32_t tile, Piece&& piece) {
  const TilePlan& t = plan.tiles[tile];
  const auto& places = plan.blocks[t.block].partition.parameters;
  for (std::uint32_t p = 0; p < places.size(); ++p) {
    const std::uint64_t begin = std::max(places[p].first, t.range.first);
    const std::uint64_t end = std::min(places[p].first + places[p].count, t.range.first + t.range.count);
    for (std::uint64_t at = begin; at < end; at += kValuesAtOnce) {
      piece(p, at - places[p].first, at - t.range.first, std::min(kValuesAtOnce, end - at));
    }
  }
}

struct TileArrays {
  float* fp32;             // fp32 weights
  std::uint16_t* weights;  // bf16 weights
  std::int16_t* residual;  // null in a frozen tile, which keeps no more than its weights
};

TileArrays arrays_of(const TilePlace& place, const TileMemory& memory) {
  std::byte* weights = memory.part[index_of(Part::kWeights)];
  std::byte* states = memory.part[index_of(Part::kStates)];
  if (place.shape.type == DType::kFloat32) return {reinterpret_cast<float*>(weights), nullptr, nullptr};
  return {nullptr, reinterpret_cast<std::uint16_t*>(weights),
          states ? reinterpret_cast<std::int16_t*>(states + state_offsets(place.shape).master) : nullptr};
}

}  // namespace

void fill_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, const WeightSource& source) {
  const TileArrays out = arrays_of(plan.tile_places[tile], memory);
  std::vector<float> values(kValuesAtOnce);
  for_each_piece(plan, tile, [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
    source(plan.tiles[tile].block, parameter, first, {values.data(), count});
    if (out.fp32) {
      std::copy_n(values.data(), count, out.fp32 + at);
      return;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      const SplitMaster split = split_master(values[i]);
      out.weights[at + i] = out.residual ? split.weight : float_to_bf16(values[i]);
      if (out.residual) out.residual[at + i] = split.residual;
    }
  });
}

void read_tile(const Plan& plan, std::uint32_t tile, const TileMemory& memory, bool exact, const WeightSink& sink) {
  const TileArrays in = arrays_of(plan.tile_places[tile], memory);
  std::vector<float> values(kValuesAtOnce);
  for_each_piece(plan, tile, [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      if (in.fp32) {
        values[i] = in.fp32[at + i];
      } else if (exact && in.residual) {
        values[i] = join_master({in.weights[at + i], in.residual[at + i]});
      } else {
        values[i] = bf16_to_float(in.weights[at + i]);
      }
    }
    sink(plan.tiles[tile].block, parameter, first, {values.data(), count});
  });
}

namespace {

float* moment_of(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment) {
  const OptimizerTile arrays = tile_arrays(plan.tile_places[tile].shape, memory, nullptr);
  return moment == Moment::kExpAvg ? arrays.exp_avg : arrays.exp_avg_sq;
}

}  // namespace

void fill_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment,
                 const WeightSource& source) {
  float* const out = moment_of(plan, tile, memory, moment);
  for_each_piece(plan, tile, [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
    source(plan.tiles[tile].block, parameter, first, {out + at, count});
  });
}

void read_moment(const Plan& plan, std::uint32_t tile, const TileMemory& memory, Moment moment,
                 const WeightSink& sink) {
  const float* const in = moment_of(plan, tile, memory, moment);
  for_each_piece(plan, tile, [&](std::uint32_t parameter, std::uint64_t first, std::uint64_t at, std::uint64_t count) {
    sink(plan.tiles[tile].block, parameter, first, {in + at, count});
  });
}

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
