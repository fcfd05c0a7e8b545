#include "src/plan/schedule.h"

#include <algorithm>

#include "src/plan/link_model.h"
#include "src/plan/schedule_program.h"
#include "swap/extents.h"
#include "swap/tile_place.h"

namespace spillway {
namespace {

ScheduleTile tile_of(const Plan& plan, std::uint32_t t) {
  const TilePlace& place = plan.tile_places[t];
  const bool stays = plan.hbm.places.empty(), trainable = place.shape.trainable;
  constexpr std::size_t kWeights = index_of(Part::kWeights);
  const std::uint64_t payload = payload_bytes(place.shape, Part::kWeights);
  ScheduleTile tile{.block = plan.tiles[t].block, .elements = trainable ? place.shape.count : 0};
  const bool comes = place.home[kWeights] != Placement::kHbm;  // of several ranks each may keep its own there
  if (comes && (!stays || place.hbm_weights)) tile.weight_bytes = payload;
  if (!stays && place.home[kWeights] == Placement::kNvme) tile.fetch_bytes = extent_bytes(place.shape, Part::kWeights);
  if (!trainable) return tile;
  if (!plan.gradients_in_hbm) tile.gradient_bytes = payload;
  std::uint64_t beside = 0;
  for (Part part : {Part::kWeights, Part::kStates}) {
    const std::uint64_t bytes = extent_bytes(place.shape, part);
    const Route route = route_of(place.home[index_of(part)]);
    if (route.read) tile.read_bytes += bytes;
    if (!plan.has_store) continue;
    if (route.read) beside += bytes;
    if (written_by_update(place, part)) {
      tile.write_bytes += bytes;
    } else {
      tile.commit_bytes += bytes;
      if (route.copied) tile.commit_d2h_bytes += payload_bytes(place.shape, part);
    }
  }
  if (tile.commit_bytes > 0) tile.commit_read_bytes = beside;
  if (plan.blocks[tile.block].gradient_home == Placement::kNvme) tile.spill_bytes = plan.tiles[t].gradient.bytes;
  return tile;
}

// Where each use finds its activation, and when that comes and goes.
std::vector<ScheduleUse> uses_of(const Plan& plan) {
  const ActivationPlan& activations = plan.activations;
  std::vector<ScheduleUse> uses;
  std::vector<std::uint32_t> went_home(activations.bytes.size(), kNothing);
  for (std::uint32_t u = 0; u < activations.uses.size(); ++u) {
    const UsePlace& planned = activations.uses[u];
    const auto [activation, access, visit] = activations.order[u];
    const std::uint64_t bytes = activations.bytes[activation];
    uses.push_back(
        {.visit = std::min(visit, static_cast<std::uint32_t>(plan.visits.size() - 1)),
         .activation = activation,
         .place = planned.place,
         .bytes = bytes,
         .nvme_bytes = activations.homes[activation].home == Placement::kNvme ? align_up(bytes, kExtentAlignment) : 0,
         .fetch = planned.fetch,
         .spill = planned.spill,
         .after = planned.after.value_or(kNothing),
         .source = planned.fetch ? went_home[activation] : kNothing});
    if (planned.spill) went_home[activation] = u;
  }
  return uses;
}

void count_traffic(const ScheduleOp& op, ScheduleTraffic& traffic) {
  switch (op.lane) {
    case Lane::kWeightReads:
    case Lane::kTileReads: traffic.nvme_read += op.bytes; break;
    case Lane::kWrites: traffic.nvme_write += op.bytes; break;
    case Lane::kH2d: traffic.h2d += op.bytes; break;
    case Lane::kD2h: traffic.d2h += op.bytes; break;
    case Lane::kNet: {
      const bool gathers = op.kind == OpKind::kGather || op.kind == OpKind::kGatherGradient;
      const bool sums = op.kind == OpKind::kScatter;
      (gathers ? traffic.gathered : sums ? traffic.scattered : traffic.leaves) += op.bytes;
      break;
    }
    default: break;
  }
}

}  // namespace

const char* name_of(Link link) {
  constexpr const char* kNames[kLinks] = {"compute", "cpu", "nvme", "h2d", "d2h", "sync", "network"};
  return kNames[static_cast<std::size_t>(link)];
}

Link Schedule::limit() const { return static_cast<Link>(std::ranges::max_element(busy) - busy.begin()); }

ScheduleInput schedule_input(const Plan& plan, const MachineRates& rates, std::span<const double> visit_seconds,
                             unsigned nodes) {
  ScheduleInput input;
  input.rates = rates;
  input.policies = step_policies(plan, nodes);
  input.update_on_device = plan.gradients_in_hbm;
  input.commits = plan.has_store && plan.slots == 2;
  input.ranks = plan.peers.count;
  for (std::uint32_t b = 0; b < plan.blocks.size(); ++b) {
    const BlockPlan& block = plan.blocks[b];
    input.blocks.push_back({.first_tile = block.first_tile,
                            .tiles = block.tiles,
                            .accumulator_bytes = block.accumulator_home.value_or(Region{}).bytes,
                            .early = block.early,
                            .network = network_of(plan, b)});
  }
  input.tiles.reserve(plan.tiles.size());
  for (std::uint32_t t = 0; t < plan.tiles.size(); ++t) input.tiles.push_back(tile_of(plan, t));
  for (std::size_t v = 0; v < plan.visits.size(); ++v) {
    input.visits.push_back({.block = plan.visits[v].block,
                            .pass = plan.visits[v].pass,
                            .compute_seconds = v < visit_seconds.size() ? visit_seconds[v] : 0});
  }
  for (const Region& place : plan.hbm.accumulators) input.accumulator_place_bytes.push_back(place.bytes);
  input.chunk_bytes = plan.host.chunk_bytes;
  input.chunks = static_cast<std::uint32_t>(plan.host.chunks.bytes / plan.host.chunk_bytes);
  input.spill_chunks = static_cast<std::uint32_t>(plan.host.spill_chunks.bytes / plan.host.chunk_bytes);
  input.uses = uses_of(plan);
  if (!plan.activations.bytes.empty()) {
    const std::uint64_t largest = std::ranges::max(plan.activations.bytes);
    input.activation_buffers =
        static_cast<std::uint32_t>(std::max<std::uint64_t>(plan.activations.up.bytes / largest, 1));
  }
  return input;
}

// Two steps of the same program. The first one starts with everything idle and nothing read ahead; the second one finds
// the machine as every later one does.
Schedule make_schedule(const ScheduleInput& input) {
  ScheduleProgram program(input);
  const std::uint32_t first_end = program.add_step();
  Schedule schedule;
  schedule.second = first_end + 1;
  const std::uint32_t second_end = program.add_step();
  schedule.ops = std::move(program.ops());
  const ModelWindow window = run_link_model(schedule.ops, input.rates, first_end, second_end);
  schedule.begin = window.begin;
  schedule.end = window.end;
  schedule.busy = window.busy;
  schedule.stalls = window.stalls;
  schedule.shared = window.shared;
  for (const ScheduleOp& op : std::span(schedule.ops).subspan(schedule.second)) count_traffic(op, schedule.traffic);
  return schedule;
}

}  // namespace spillway
