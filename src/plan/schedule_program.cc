#include "src/plan/schedule_program.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

std::vector<std::uint64_t> accumulator_bytes(const std::vector<ScheduleBlock>& blocks) {
  std::vector<std::uint64_t> bytes;
  for (const ScheduleBlock& block : blocks) bytes.push_back(block.accumulator_bytes);
  return bytes;
}

// Those that are updated inside backward, as their gradients complete.
std::vector<std::uint32_t> early_blocks(const ScheduleInput& input) {
  std::vector<std::uint32_t> blocks;
  std::vector<std::uint8_t> seen = frozen_blocks(input);
  for (std::size_t v = input.visits.size(); v-- > 0 && !input.update_on_device;) {
    const ScheduleVisit& visit = input.visits[v];
    if (visit.pass != Pass::kBackward || std::exchange(seen[visit.block], 1)) continue;
    if (input.blocks[visit.block].early) blocks.push_back(visit.block);
  }
  std::ranges::reverse(blocks);
  return blocks;
}

UpdateQueueOptions tile_queue_options(const ScheduleInput& input, bool early) {
  UpdateQueueOptions options{.order = input.update_order,
                             .buffers = std::max(input.tile_buffers, 1u),
                             .nodes = input.nodes,
                             .reads_ahead = input.reads_ahead,
                             .writes_behind = input.writes_behind,
                             .early_planned = early};
  for (const ScheduleBlock& block : input.blocks) options.blocks.push_back({block.first_tile, block.tiles});
  for (const ScheduleTile& tile : input.tiles) options.trainable.push_back(tile.elements > 0);
  return options;
}

}  // namespace

ScheduleProgram::ScheduleProgram(const ScheduleInput& input)
    : in_(input),
      places_(input.place_bytes.size()),
      chunk_freed_(input.chunks, kNoOp),
      early_(early_blocks(input)),
      queue_(tile_queue_options(input, !early_.empty())),
      buffers_(std::max(input.tile_buffers, 1u)),
      written_(input.tiles.size(), kNoOp),
      spilled_(input.tiles.size(), kNoOp),
      landed_(input.tiles.size(), kNoOp),
      staging_freed_(input.staging_bytes.size(), kNoOp),
      staging_of_(input.blocks.size(), kNothing),
      passing_(input.passing_bytes.size(), kNothing),
      passing_freed_(input.passing_bytes.size(), kNoOp),
      passing_of_(input.blocks.size(), kNothing),
      spill_freed_(input.spill_chunks, kNoOp),
      sums_at_home_(input.blocks.size(), kNoOp),
      sums_(input.accumulator_place_bytes.size()),
      sums_residency_(input.accumulator_place_bytes, accumulator_bytes(input.blocks)) {
  last_.fill(kNoOp);
  leaving_.freed.assign(in_.activation_buffers, kNoOp);
  coming_.freed.assign(in_.activation_buffers, kNoOp);
  note_visits();
  skip_early();
  updating_ = !in_.update_on_device;
}

void ScheduleProgram::note_visits() {
  std::vector<std::uint32_t> last_visit(in_.blocks.size(), kNothing), last_backward(in_.blocks.size(), kNothing);
  for (std::uint32_t v = 0; v < in_.visits.size(); ++v) {
    const std::uint32_t block = in_.visits[v].block;
    previous_.push_back(last_visit[block]);
    last_visit[block] = v;
    if (in_.visits[v].pass == Pass::kBackward) last_backward[block] = v;
  }
  completes_.resize(in_.visits.size());
  for (const std::uint32_t v : last_backward) {
    if (v != kNothing) completes_[v] = 1;
  }
}

// As WeightPlaces::begin_step: the update changes every weight, but for frozen blocks.
void ScheduleProgram::plan_places() {
  if (in_.weights_stay) return;
  std::vector<std::uint8_t> filled = places_that_stay(in_.owners, frozen_blocks(in_));
  for (std::size_t p = 0; p < filled.size(); ++p) filled[p] &= places_[p].block == in_.owners[p];
  for (std::size_t p = 0; p < places_.size(); ++p) {
    if (!filled.empty() && filled[p] != 0) continue;
    places_[p].block = kNothing;
    places_[p].ahead = false;
  }
  std::vector<std::uint32_t> visit_blocks;
  std::vector<std::uint64_t> block_bytes;
  for (const ScheduleVisit& visit : in_.visits) visit_blocks.push_back(visit.block);
  for (const ScheduleBlock& block : in_.blocks) block_bytes.push_back(block.weight_bytes);
  planned_ = assign_places(visit_blocks, block_bytes, in_.place_bytes,
                           {.owners = in_.owners, .reuse_bytes = in_.reuse_bytes, .filled = filled});
}

// The first step begins with what the one before it has left: that one has updated these.
void ScheduleProgram::skip_early() {
  for (const std::uint32_t block : early_) queue_.tell(QueueEvent::kComplete, block);
  while (const auto turn = queue_.next_turn(Turns::kEarlyAll)) {
    while (queue_.next_move(Moves::kAll)) {
    }
    queue_.end_tile(turn->first, true, false);
    queue_.tell(QueueEvent::kWritten, queue_.buffer(turn->first));
    queue_.tell(QueueEvent::kTurnDone);
  }
}

std::uint32_t ScheduleProgram::add(ScheduleOp op, std::initializer_list<std::uint32_t> after) {
  const auto index = static_cast<std::uint32_t>(ops_.size());
  std::size_t count = 0;
  auto wait_for = [&](std::uint32_t other) {
    if (other != kNoOp && std::find(op.after.begin(), op.after.begin() + count, other) == op.after.begin() + count) {
      op.after[count++] = other;
    }
  };
  for (const std::uint32_t other : after) wait_for(other);
  ops_.push_back(op);
  last_[static_cast<std::size_t>(op.lane)] = index;
  if (op.lane == Lane::kCaller) issued_ = index;
  return index;
}

std::uint32_t ScheduleProgram::add_step() {
  plan_places();
  cursor_ = fetched_ = 0;
  uses_.assign(in_.uses.size(), {});
  used_ = loads_ = 0;
  if (updating_) queue_.tell(QueueEvent::kBegin);
  start_loads(Moves::kGradients);  // of what was read ahead
  prefetch();
  for (std::uint32_t v = 0; v < in_.visits.size(); ++v) visit(v);
  return end_step();
}

// Engine::acquire to Lease::release.
void ScheduleProgram::visit(std::uint32_t v) {
  const ScheduleVisit& visit = in_.visits[v];
  const bool backward = visit.pass == Pass::kBackward;
  if (backward && updating_) settle();
  if (backward && !backward_) {
    backward_ = true;
    if (queue_.expect(early_)) start_loads();
  }
  const std::uint32_t sums = backward ? bring_sums(v) : kNoOp;
  cursor_ = v + 1;
  fetched_ = std::max(fetched_, cursor_);
  Place stays;
  Place& place = in_.weights_stay ? stays : places_[planned_[v].place];
  const std::uint32_t place_index = in_.weights_stay ? kNothing : planned_[v].place;
  if (in_.weights_stay) {
    if (updating_) {
      run_until(visit.block, kNothing);
      place.ready = last(Lane::kH2d);
    }
  } else if (place.block != visit.block) {
    bring(place_index, visit.block);
  }
  place.leased = true;
  place.ahead = false;
  const ScheduleOp of_visit{.visit = v, .block = visit.block, .place = place_index};
  ScheduleOp acquire = of_visit, compute = of_visit;
  add(acquire, {issued_, place.open});
  prefetch();
  // Nothing more to fetch: the first tiles of this step's update come next.
  if (cursor_ == in_.visits.size() && !updating_ && !in_.weights_stay && !in_.update_on_device) {
    queue_.tell(QueueEvent::kFetched);
    start_loads();
  }

  compute.kind = OpKind::kCompute;
  compute.lane = Lane::kCompute;
  compute.seconds = visit.compute_seconds;
  const bool completes = completes_[v] && !in_.update_on_device;
  if (completes) take_passing(visit.block);
  const std::uint32_t staging = completes ? take_staging(visit.block) : kNothing;
  const std::uint32_t computed =
      this->compute(compute, place.ready, staging == kNothing ? kNoOp : staging_freed_[staging], sums);
  if (backward) add_to_sums(v, computed);
  if (completes) complete_gradient(visit.block, computed);
  place.released = computed;
  place.leased = false;
  if (!in_.weights_stay && planned_[v].leaves) place.block = kNothing;
  prefetch();
  update_early(Turns::kEarly);  // while the device computes this visit
  if (completes) queue_.tell(QueueEvent::kLanded, visit.block);
}

// Engine::step.
std::uint32_t ScheduleProgram::end_step() {
  if (updating_) settle();
  update_early(Turns::kEarlyAll);
  if (in_.update_on_device) {
    for (const std::uint32_t t : in_.update_order) {
      const ScheduleTile& tile = in_.tiles[t];
      add({.kind = OpKind::kUpdate,
           .lane = Lane::kCompute,
           .block = tile.block,
           .tile = t,
           .seconds = static_cast<double>(tile.elements) * in_.rates.update_seconds},
          {issued_});
    }
    settle();
  }
  const std::uint32_t step =
      add({.kind = OpKind::kStep}, {issued_, last(Lane::kCompute), last(Lane::kD2h), last(Lane::kEarlyUpdates)});
  backward_ = false;
  updating_ = !in_.update_on_device;
  return step;
}

void ScheduleProgram::prefetch() {
  for (; !in_.weights_stay && fetched_ < in_.visits.size(); ++fetched_) {
    const VisitPlace& planned = planned_[fetched_];
    const std::uint32_t block = in_.visits[fetched_].block;
    if (!planned.fetch) continue;
    if (awaited(block)) {
      // Its first visit brings the weights straight from the update; a later one has to wait for that.
      if (previous_[fetched_] != kNothing && previous_[fetched_] >= cursor_) return;
      continue;
    }
    if (planned.after && *planned.after >= cursor_) return;
    if (places_[planned.place].leased) return;
    std::uint64_t bytes_ahead = 0;
    for (const Place& place : places_) bytes_ahead += place.ahead ? in_.blocks[place.block].weight_bytes : 0;
    if (bytes_ahead >= in_.prefetch_bytes) return;
    fetch(planned.place, block);
    places_[planned.place].ahead = true;
  }
}

// Weights from the update that is still to come, else from where they live.
void ScheduleProgram::bring(std::uint32_t index, std::uint32_t block) {
  if (awaited(block) && run_until(block, index)) {
    Place& place = places_[index];
    place.block = block;
    place.ready = last(Lane::kH2d);
    place.open = kNoOp;
    return;
  }
  fetch(index, block);
}

void ScheduleProgram::fetch(std::uint32_t index, std::uint32_t block) {
  Place& place = places_[index];
  place.block = block;
  place.open = kNoOp;
  const ScheduleBlock& of = in_.blocks[block];
  for (std::uint32_t t = of.first_tile; t < of.first_tile + of.tiles; ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.fetch_bytes > 0) {
      fetch_through_chunks(t, index);
      place.open = last(Lane::kChecks);
      continue;
    }
    add({.kind = OpKind::kCopyWeights,
         .lane = Lane::kH2d,
         .block = block,
         .tile = t,
         .place = index,
         .bytes = tile.weight_bytes,
         .seconds = seconds_of(tile.weight_bytes, in_.rates.h2d)},
        {issued_, place.released});
  }
  place.ready = last(Lane::kH2d);
}

// A tile's weights in pieces of at most half the chunks, so that one is read while the other is copied. Chunks are used
// in turn and given back in turn, so a piece waits for the one that had its last chunk.
void ScheduleProgram::fetch_through_chunks(std::uint32_t t, std::uint32_t place) {
  SPILLWAY_CHECK(in_.chunks > 0 && in_.chunk_bytes > 0, "weights on NVMe are fetched through chunks");
  const ScheduleTile& tile = in_.tiles[t];
  const std::uint64_t piece_bytes = std::max(in_.chunks / 2, 1u) * in_.chunk_bytes;
  for (std::uint64_t done = 0; done < tile.fetch_bytes; done += piece_bytes) {
    const std::uint64_t bytes = std::min(piece_bytes, tile.fetch_bytes - done);
    const std::uint64_t payload = std::min(bytes, tile.weight_bytes - std::min(done, tile.weight_bytes));
    const auto chunks = static_cast<std::uint32_t>(div_up(bytes, in_.chunk_bytes));
    const std::uint64_t last_chunk = chunk_ + chunks - 1;
    ScheduleOp op{.kind = OpKind::kReadWeights,
                  .lane = Lane::kWeightReads,
                  .block = tile.block,
                  .tile = t,
                  .place = place,
                  .buffer = static_cast<std::uint32_t>(chunk_ % in_.chunks),
                  .bytes = bytes,
                  .seconds = seconds_of(bytes, in_.rates.nvme_read)};
    const std::uint32_t read = add(op, {issued_, written_[t], chunk_freed_[last_chunk % in_.chunks]});
    op.kind = OpKind::kCheckWeights;
    op.lane = Lane::kChecks;
    op.seconds = seconds_of(bytes, in_.rates.checksum);
    const std::uint32_t check = add(op, {read});
    op.kind = OpKind::kCopyWeights;
    op.lane = Lane::kH2d;
    op.bytes = payload;
    op.seconds = seconds_of(payload, in_.rates.h2d);
    const std::uint32_t copy = add(op, {check, places_[place].released});
    for (; chunk_ <= last_chunk; ++chunk_) chunk_freed_[chunk_ % in_.chunks] = copy;
  }
}

// What the visit adds to comes from home, or begins anew; what visits before added to leaves. Returns what the visit
// waits for.
std::uint32_t ScheduleProgram::bring_sums(std::uint32_t v) {
  const std::uint32_t block = in_.visits[v].block;
  const std::uint64_t bytes = in_.blocks[block].accumulator_bytes;
  if (bytes == 0) return kNoOp;
  const AccumulatorResidency::Arrival arrival = sums_residency_.bring(block);
  Sums& sums = sums_[arrival.place];
  if (arrival.leaves) send_home(*arrival.leaves, arrival.place);
  if (arrival.comes) {
    sums.free = add({.kind = OpKind::kLoadAccumulator,
                     .lane = Lane::kH2d,
                     .visit = v,
                     .block = block,
                     .place = arrival.place,
                     .bytes = bytes,
                     .seconds = seconds_of(bytes, in_.rates.h2d)},
                    {issued_, sums_at_home_[block], sums.free});
  }
  for (std::uint32_t p = 0; p < sums_.size(); ++p) {
    if (p == arrival.place) continue;
    if (const auto leaves = sums_residency_.leave(p)) send_home(*leaves, p);
  }
  return sums_residency_.add(block) ? kNoOp : sums.free;
}

void ScheduleProgram::send_home(std::uint32_t block, std::uint32_t place) {
  const std::uint64_t bytes = in_.blocks[block].accumulator_bytes;
  sums_[place].free = sums_at_home_[block] = add({.kind = OpKind::kSaveAccumulator,
                                                  .lane = Lane::kD2h,
                                                  .block = block,
                                                  .place = place,
                                                  .bytes = bytes,
                                                  .seconds = seconds_of(bytes, in_.rates.d2h)},
                                                 {issued_, sums_[place].added});
}

// The visit has added to them.
void ScheduleProgram::add_to_sums(std::uint32_t v, std::uint32_t computed) {
  const std::uint32_t block = in_.visits[v].block;
  if (in_.blocks[block].accumulator_bytes == 0) return;
  const std::uint32_t place = sums_residency_.bring(block).place;
  sums_[place].added = computed;
  if (!completes_[v]) return;
  sums_residency_.complete(block);
  sums_[place].free = computed;
}

// A visit's compute, use by use. A use waits for its activation, and one that is written for its place.
std::uint32_t ScheduleProgram::compute(ScheduleOp op, std::uint32_t weights, std::uint32_t staging,
                                       std::uint32_t sums) {
  std::uint32_t end = used_;
  while (end < uses_.size() && in_.uses[end].visit <= op.visit) ++end;
  if (used_ == end) return add(op, {issued_, weights, staging, sums});
  op.seconds /= end - used_;
  std::uint32_t computed = kNoOp;
  while (used_ < end) {
    const ScheduleUse& planned = in_.uses[used_];
    Use& use = uses_[used_];
    if (!planned.fetch && planned.after != kNothing) use.loaded = uses_[planned.after].left;
    op.use = used_;
    use.left = computed = add(op, {issued_, weights, staging, use.loaded, sums});
    if (planned.spill) save_activation(used_);
    ++used_;
    load_activations();
  }
  return computed;
}

// Whatever is at home, and whose place was used for the last time before, in the order of uses.
void ScheduleProgram::load_activations() {
  for (; loads_ < uses_.size(); ++loads_) {
    const ScheduleUse& planned = in_.uses[loads_];
    if (!planned.fetch) continue;
    if ((planned.after != kNothing && planned.after >= used_) || planned.source >= used_) return;
    ScheduleOp op{
        .visit = planned.visit, .block = in_.visits[planned.visit].block, .use = loads_, .bytes = planned.nvme_bytes};
    std::uint32_t there = uses_[planned.source].home;
    const std::uint32_t left = planned.after == kNothing ? kNoOp : uses_[planned.after].left;
    if (planned.nvme_bytes > 0) {
      op.kind = OpKind::kReadActivation;
      op.lane = Lane::kWeightReads;
      op.buffer = coming_.take();
      op.seconds = seconds_of(op.bytes, in_.rates.nvme_read);
      there = add(op, {issued_, there, coming_.free_after(op.buffer)});
    }
    op.kind = OpKind::kLoadActivation;
    op.lane = Lane::kH2d;
    op.place = planned.place;
    op.bytes = planned.bytes;
    op.seconds = seconds_of(op.bytes, in_.rates.h2d);
    uses_[loads_].loaded = add(op, {issued_, there, left});
    coming_.free_by(op.buffer, uses_[loads_].loaded);
  }
}

void ScheduleProgram::save_activation(std::uint32_t use) {
  const ScheduleUse& planned = in_.uses[use];
  const bool nvme = planned.nvme_bytes > 0;
  ScheduleOp op{.kind = OpKind::kSaveActivation,
                .lane = Lane::kD2h,
                .visit = planned.visit,
                .block = in_.visits[planned.visit].block,
                .use = use,
                .place = planned.place,
                .buffer = nvme ? leaving_.take() : kNothing,
                .bytes = planned.bytes,
                .seconds = seconds_of(planned.bytes, in_.rates.d2h)};
  uses_[use].home = uses_[use].left = add(op, {uses_[use].left, leaving_.free_after(op.buffer)});
  if (!nvme) return;
  op.kind = OpKind::kWriteActivation;
  op.lane = Lane::kWrites;
  op.place = kNothing;
  op.bytes = planned.nvme_bytes;
  op.seconds = seconds_of(op.bytes, in_.rates.nvme_write);
  uses_[use].home = add(op, {uses_[use].home});
  leaving_.free_by(op.buffer, uses_[use].home);
}

}  // namespace spillway
