// The schedule of a step: for every block and tile when it is read, copied, computed, brought down, updated, written
// and committed, and in which place or buffer; with it the predicted seconds of a step, the link that limits it and
// what compute waits for. Pure: no threads, files or clocks; the same input gives the same bytes; linear in the tiles.
//
//   Plan, rates ─► schedule_input() ─► ScheduleInput ─► make_schedule() ─► Schedule
//                                                         │
//            schedule_program: what the engine issues, in its order, and what each of it waits for
//            link_model:       when that runs, on lanes that share links and cores
//
// Nothing waits for what is issued after it, so a schedule has no deadlock. The order of issue is the engine's,
// decided by the engine's own objects (swap/policy): which weights come when, from where and to which place
// (WeightResidency), which tile is read, updated and written next (UpdateQueue), where gradients lie and when they
// leave (GradientMemory), the places of accumulators and activations. Such a rule is changed there alone;
// schedule_program.cc and schedule_update.cc say what their answers cost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spillway/model.h"
#include "spillway/stall.h"
#include "src/plan/machine_rates.h"
#include "src/plan/network_traffic.h"
#include "src/plan/plan.h"
#include "src/plan/step_policies.h"

namespace spillway {

inline constexpr std::uint32_t kNothing = UINT32_MAX;  // no visit, block, tile, use, place or buffer

struct ScheduleBlock {
  std::uint32_t first_tile = 0, tiles = 0;
  std::uint64_t accumulator_bytes = 0;  // up before a visit adds to what one before left, and down after it
  bool early = false;                   // updated inside backward, as soon as its gradient is down
  BlockNetwork network = {};            // with several ranks
};

// A tile, by the bytes that it moves.
struct ScheduleTile {
  std::uint32_t block = 0;
  std::uint64_t elements = 0;        // updated; 0: frozen
  std::uint64_t read_bytes = 0;      // NVMe, for its update
  std::uint64_t write_bytes = 0;     // NVMe, after its update
  std::uint64_t fetch_bytes = 0;     // NVMe, when its weights are fetched; 0: they lie in host memory
  std::uint64_t weight_bytes = 0;    // h2d, when they are fetched or come from the update
  std::uint64_t gradient_bytes = 0;  // d2h; 0: the gradient stays in HBM
  std::uint64_t commit_bytes = 0;    // NVMe, at a commit: what no update writes
  std::uint64_t commit_d2h_bytes = 0;
  std::uint64_t commit_read_bytes = 0;  // NVMe: the part beside it
  std::uint64_t spill_bytes = 0;        // NVMe: the gradient is written when it is down, and read back with the states
};

struct ScheduleVisit {
  std::uint32_t block = 0;
  Pass pass = Pass::kForward;
  double compute_seconds = 0;  // alone on the device; in equal parts, one for each of its uses of activations
};

// A use of an activation, where they move: see UsePlace.
struct ScheduleUse {
  std::uint32_t visit = 0, activation = 0, place = 0;
  std::uint64_t bytes = 0;       // up or down
  std::uint64_t nvme_bytes = 0;  // 0: at home in host memory
  bool fetch = false, spill = false;
  std::uint32_t after = kNothing;   // the use before it of its place, when the activation comes there
  std::uint32_t source = kNothing;  // the use after which it went home, when it is fetched
};

struct ScheduleInput {
  std::vector<ScheduleVisit> visits;
  std::vector<ScheduleBlock> blocks;
  std::vector<ScheduleTile> tiles;
  StepPolicies policies = {};     // blocks and tiles of theirs are these
  bool update_on_device = false;  // everything lies in HBM
  bool commits = true;            // this step is made durable
  std::uint64_t chunk_bytes = 0;
  std::uint32_t chunks = 0;                                 // weights in flight
  std::uint32_t spill_chunks = 0;                           // gradients on their way to NVMe, chunk_bytes each
  std::vector<std::uint64_t> accumulator_place_bytes = {};  // of those that move
  std::vector<ScheduleUse> uses = {};                       // of activations, in order; none: nothing moves
  std::uint32_t activation_buffers = 1;  // activations on their way to NVMe at a time, and on their way back
  MachineRates rates;
  std::uint32_t ranks = 1;
};

enum class OpKind : std::uint8_t {
  kAcquire,          // the caller has its block: its reads are in, its copies enqueued
  kCompute,          // a visit, or what it does with one use of an activation
  kReadWeights,      // of a block that is fetched: NVMe to chunks
  kCheckWeights,     // their checksum
  kCopyWeights,      // to the block's place, from chunks, host memory or the update's buffer
  kReadTile,         // states and weights (and a spilled gradient) of the next update
  kUpdate,           // the optimizer
  kWriteTile,        // after the update, or at a commit
  kCopyGradient,     // down
  kSpillGradient,    // to NVMe
  kReadGradient,     // from NVMe, after its tile
  kFinishStep,       // the caller waits until everything updated is where it lives
  kCopyTile,         // down, for a commit
  kHashTile,         // for a commit
  kCommit,           // sync, record, sync
  kStep,             // the gradients are down and compute is done: step() returns
  kSaveActivation,   // down, after a use
  kWriteActivation,  // to NVMe
  kReadActivation,   // from NVMe
  kLoadActivation,   // up, before a use
  kSaveAccumulator,  // down, after a visit
  kLoadAccumulator,  // up, while the next visit of its block computes
  kGather,           // other ranks' part of a block's weights
  kScatter,          // a block's sums: their part to other ranks, and what those have of this one's
  kAddSums,          // a visit adds what it computed
  kGatherGradient,   // where ranks own no parts: what each has rounded of the sums
  kGatherLeaves,     // of the norm, and which parameters had a gradient
  kAgree,            // whether all went well on all ranks
  kMeet,             // the caller waits for those
};

// A queue whose operations run one after the other, in order of issue. What the caller's thread updates inside backward
// has one of its own, since it does so whenever a tile is there.
enum class Lane : std::uint8_t {
  kCompute,
  kCaller,
  kEarlyUpdates,
  kWeightReads,
  kTileReads,
  kChecks,
  kWrites,
  kH2d,
  kD2h,
  kNet  // collectives, in the order of the calls
};
inline constexpr std::size_t kLanes = 10;

inline constexpr std::uint32_t kNoOp = UINT32_MAX;  // no such operation

struct ScheduleOp {
  OpKind kind = OpKind::kAcquire;
  Lane lane = Lane::kCaller;
  std::uint32_t visit = kNothing, block = kNothing, tile = kNothing, use = kNothing;
  std::uint32_t place = kNothing;  // of the block in HBM; kCopyGradient: its staging
  // Tile buffer. Weights and spilled gradients on their way: the first of their chunks, of which they hold as many as
  // their bytes need, in a ring. Other gradients and activations: what they pass through.
  std::uint32_t buffer = kNothing;
  std::uint64_t bytes = 0;
  double seconds = 0;                                                     // of work, alone on the machine
  double start = 0, end = 0;                                              // seconds from the start of the first step
  std::array<std::uint32_t, 5> after{kNoOp, kNoOp, kNoOp, kNoOp, kNoOp};  // ends before this starts; issued before it
  bool operator==(const ScheduleOp&) const = default;
};

enum class Link : std::uint8_t { kCompute, kCpu, kNvme, kH2d, kD2h, kSync, kNetwork };
inline constexpr std::size_t kLinks = 7;
const char* name_of(Link link);

struct ScheduleTraffic {
  std::uint64_t nvme_read = 0, nvme_write = 0, h2d = 0, d2h = 0;
  // With several ranks: weights (in stage 0 gradients) and leaves of the norm that come, and sums that go. As many go,
  // and come, on average.
  std::uint64_t gathered = 0, scattered = 0, leaves = 0;
  std::uint64_t network() const { return gathered + scattered + leaves; }
};

struct Schedule {
  std::vector<ScheduleOp> ops;        // of two steps, in order of issue
  std::uint32_t second = 0;           // the first operation of the second step, which is a step in the steady state
  double begin = 0, end = 0;          // of the second step: from the end of one step() to the end of the next
  ScheduleTraffic traffic;            // of the second step
  std::array<double, kLinks> busy{};  // seconds of each link's own work in it, never more than the step takes
  StallSeconds stalls;                // of it, compute waiting; kSave and kOther are no part of a schedule
  double shared = 0;                  // seconds that compute lost to others on its cores

  double seconds() const { return end - begin; }
  Link limit() const;  // the busiest link
};

// The input for a plan. `visit_seconds` of compute, one for each visit of the plan, or none. `nodes` of the machine.
ScheduleInput schedule_input(const Plan& plan, const MachineRates& rates, std::span<const double> visit_seconds,
                             unsigned nodes = 1);

Schedule make_schedule(const ScheduleInput& input);

}  // namespace spillway
