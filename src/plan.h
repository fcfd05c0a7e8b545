// The plan of a run: where every tile is at home and every byte of the three budgets, decided before anything is
// allocated, opened or written. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "src/parameter_groups.h"
#include "src/partition.h"
#include "swap/tile_place.h"
#include "swap/tile_store.h"

namespace spillway {

struct Region {
  std::uint64_t offset = 0, bytes = 0;
};

struct BlockPlan {
  BlockPartition partition;
  std::uint32_t first_tile = 0, tiles = 0;
  Region weights;   // HBM, when weights stay there
  Region gradient;  // host arena, or HBM when the states live there; trainable elements in the weight type
  std::optional<Region> accumulator;  // HBM, fp32, trainable elements
  bool accumulator_shared = false;    // with blocks that are visited at other times
};

struct TilePlan {
  std::uint32_t block = 0;
  TileRange range;
  std::vector<GroupRange> groups;  // empty when frozen
};

struct HbmPlan {
  Region workspace, leaves, norms, finite;
  std::vector<Region> places;   // of weights on loan, largest first; none: weights stay in HBM
  std::vector<Region> staging;  // gradients on their way down, largest first
};

struct HostPlan {
  Region chunks, buffers, record, norms;
  std::uint64_t chunk_bytes = 0, buffer_bytes = 0;
  std::uint32_t buffers_count = 0;
};

struct Plan {
  ParameterGroups groups;
  std::vector<BlockPlan> blocks;
  std::vector<TilePlan> tiles;
  std::vector<TilePlace> tile_places;  // index as tiles
  std::vector<Visit> visits;
  bool visits_given = false;  // else the first step records them
  bool gradients_in_hbm = false;
  HbmPlan hbm;
  HostPlan host;
  bool has_store = false;
  std::uint32_t slots = 2;
  std::uint64_t scratch_bytes = 0;  // of the store, for bandwidth probes
  std::uint64_t store_bytes = 0;
  StoreIdentity identity;
  Ledger ledger;
};

// The shape of the plan's store, as TileStore wants it.
TileStore::Created store_shape(const Plan& plan);

// Throws kInvalidArgument (model or configuration) and kDoesNotFit, naming the smallest change that fits. For more NUMA
// nodes than one there are buffers in multiples of them, where the budget has room for one each.
Plan make_plan(const Config& config, const ModelDescription& model, unsigned nodes = 1);

// `tile 3 of block h.0 (h.0.attn.c_attn.weight …)`, for messages.
std::string tile_name(const Plan& plan, const ModelDescription& model, std::uint32_t tile);

}  // namespace spillway
