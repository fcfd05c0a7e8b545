// The plan of a run: where every tile is at home and every byte of the three budgets, decided before anything is
// allocated, opened or written. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spillway/communicator.h"
#include "spillway/config.h"
#include "spillway/engine.h"
#include "spillway/model.h"
#include "src/plan/parameter_groups.h"
#include "src/plan/partition.h"
#include "swap/policy/activation_residency.h"
#include "swap/policy/residency.h"
#include "swap/rank.h"
#include "swap/store_shape.h"
#include "swap/tile_place.h"

namespace spillway {

struct Region {
  std::uint64_t offset = 0, bytes = 0;
};

struct BlockPlan {
  BlockPartition partition;
  std::vector<SectionShare> shares;     // index as the partition's sections
  std::uint64_t gradient_elements = 0;  // that this rank has of it
  std::uint32_t first_tile = 0, tiles = 0;
  Region weights;  // HBM, when weights stay there
  // Where its rounded gradient waits for the update: in HBM beside states that live there; in host memory, as the
  // update may need the norm of all gradients; on NVMe, in the scratch area, from where it comes back beside the tile's
  // states. None: it passes through one of HostPlan::passing, as the block is updated inside backward once it is
  // complete.
  Home gradient_home = Placement::kHost;
  Region gradient;           // in the weight type, in HBM or host memory; only its size in other places
  bool early = false;        // updated inside backward
  bool speculative = false;  // the same, when clipping had no effect in the step before: it is taken back when it has
  std::optional<Region> accumulator;       // HBM, fp32, trainable elements, sum_slots times
  std::optional<Region> accumulator_home;  // host memory, instead: it comes to HBM to be added to
  bool accumulator_shared = false;         // with blocks that are visited at other times
  std::uint32_t sum_slots = 1;             // partial sums: see PartSums
  bool sums_in_order = true;
  Region insides;             // HBM
  bool insides_kept = false;  // else the region is shared, and backward computes them once more
};

struct TilePlan {
  std::uint32_t block = 0;
  TileRange range;
  std::uint64_t gradient_first = 0;  // of its first element, in the rank's part of the block's gradient
  std::vector<GroupRange> groups;    // empty when frozen
  Extent gradient = {};              // of a spilled one; the offset counts from the start of the scratch area
};

struct HbmPlan {
  Region workspace, leaves, norms, finite;
  Region insides;              // of the blocks that do not keep theirs, in turn
  std::vector<Region> places;  // of weights on loan; none: weights stay in HBM
  // See WeightResidencyOptions: whose a place is alone, when a block leaves, how far the next are fetched ahead.
  std::vector<std::optional<std::uint32_t>> owners;
  std::uint64_t reuse_bytes = UINT64_MAX, prefetch_bytes = UINT64_MAX;
  std::vector<Region> staging;       // gradients on their way down, largest first
  std::vector<Region> accumulators;  // places for those at home in host memory, largest first
};

struct ActivationPlan {
  struct At {
    Placement home = Placement::kHbm;  // it never leaves that
    std::uint64_t offset = 0;          // else in the host arena, or in NvmePlan::activations
  };
  std::vector<Region> places;        // HBM; as many as activations when nothing moves
  std::vector<UsePlace> uses;        // empty: nothing moves, every activation has its own place
  std::vector<ActivationUse> order;  // the model's, index as uses
  std::vector<std::uint64_t> bytes;  // of each activation, when they move
  std::vector<At> homes;             // likewise
  Region down, up;                   // host: chunks on the way to NVMe and back
};

struct HostPlan {
  Region chunks, buffers, record, norms;
  Region overflow;              // for the word in which an update on the device says that a result is not finite
  std::vector<Region> passing;  // for gradients that pass, largest first
  Region spill_chunks;          // for gradients that are spilled, chunk_bytes each
  // Of weights that are the caller's: checksums of what an update left, and a tile's gradient on its way into one.
  Region weight_checksums, tile_gradient;
  Region others;   // with several ranks: for a tile of another one
  Region staging;  // ditto, where they are not in host memory: weights and gradients of staged_elements, several times
  std::uint64_t staged_elements = 0;
  std::uint64_t chunk_bytes = 0, buffer_bytes = 0;
  std::uint32_t buffers_count = 0;
  bool reads_ahead = true, writes_behind = true;  // of the tile that is being updated
};

// What the program keeps by itself.
struct KeptPlan {
  std::uint64_t host_bytes = 0, nvme_bytes = 0;
};

struct NvmePlan {
  Region activations;             // in the store's scratch area, after spilled gradients
  std::uint64_t probe_bytes = 0;  // of it, for bandwidth probes before anything is there
};

struct Plan {
  Rank rank;   // among those that the model is cut for: the tiles are that rank's
  Rank peers;  // among those that train together: the same, or more than one where none owns a part
  ParameterGroups groups;
  std::vector<BlockPlan> blocks;
  std::vector<TilePlan> tiles;
  std::vector<TilePlace> tile_places;  // index as tiles
  std::vector<Visit> visits;
  bool visits_given = false;  // else the first step records them
  // Of a step, this rank's, and how many parts it sums them in. Those of all ranks are added up as `sums` says.
  std::uint32_t micro_batches = 1, sum_parts = 1;
  Sums sums = Sums::kTree;
  DType wire = DType::kFloat32;  // as which they travel
  bool gradients_in_hbm = false;
  bool early_blocks = false;  // some are updated inside backward
  HbmPlan hbm;
  HostPlan host;
  ActivationPlan activations;
  KeptPlan kept;
  NvmePlan nvme;
  bool has_store = false;
  std::uint32_t slots = 2;
  std::uint64_t scratch_bytes = 0;  // of the store, for bandwidth probes and what is spilled
  std::uint64_t spill_bytes = 0;    // of them, spilled gradients
  std::uint64_t store_bytes = 0;
  StoreIdentity identity;
  Ledger ledger;
  std::vector<std::string> facts;  // for people: what a step finds in place, and what DeepSpeed's knobs change
};

// What a step asks for, and how much of it is there already: blocks in HBM when they are visited, and bytes of the
// tiles that the update works on in host memory or HBM. StepReport has the same as measured.
struct PlannedHits {
  std::uint64_t visits = 0, hits = 0;  // while weights are on loan
  std::uint64_t tile_bytes = 0, tile_hit_bytes = 0;
};
PlannedHits planned_hits(const Plan& plan);
// Where every visit of a step finds its block, with the places of `hbm`: of every step but the first, which also
// fetches what stays from then on.
std::vector<VisitPlace> planned_visits(const Plan& plan, const HbmPlan& hbm);
// Of every block: nothing in it is trained, so that its weights in HBM are good for any step.
std::vector<std::uint8_t> frozen_blocks(const Plan& plan);
// Of every block: it is frozen, and has a place of its own in HBM, so that it is fetched once.
std::vector<std::uint8_t> blocks_that_stay(const Plan& plan);

// The form of its store's commit records. No fingerprint before there is an identity.
RecordForm record_form(const Plan& plan);

// The shape of the plan's store, as TileStore takes it.
StoreShape store_shape(const Plan& plan);

// Throws kInvalidArgument (model or configuration) and kDoesNotFit, naming the smallest change that fits. For more NUMA
// nodes than one there are buffers in multiples of them, where the budget has room for one each. `peers`: which of
// those that train together the plan is of.
Plan make_plan(const Config& config, const ModelDescription& model, unsigned nodes = 1, Rank peers = {});

// What an optimizer whose weights are the caller's has besides.
struct CallerMemory {
  bool gradients = false;  // a place for each block's in host memory
  // Room for tensors that are elsewhere, on their way: for a few, or to keep a link busy.
  enum class Staging : std::uint8_t { kNone, kLittle, kMuch } staging = Staging::kNone;
};
// Of such an optimizer: nothing has a place in HBM, and no order of visits is of concern. Throws as make_plan.
Plan make_optimizer_plan(const Config& config, const ModelDescription& model, CallerMemory memory);

// Of HBM beyond its budget, in whole MiB, with which this plan would keep the inner activations of one block more;
// there must be one that it does not keep. What is left beside what comes first counts, and what comes first takes its
// part.
std::uint64_t bytes_to_keep_insides(const Config& config, const ModelDescription& model, const Plan& plan);

// `tile 3 of block h.0 (h.0.attn.c_attn.weight …)`, for messages.
std::string tile_name(const Plan& plan, const ModelDescription& model, std::uint32_t tile);

}  // namespace spillway
