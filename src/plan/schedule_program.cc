#include "src/plan/schedule_program.h"

#include <algorithm>
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
  std::vector<std::uint8_t> seen = input.policies.weights.frozen;
  for (std::size_t v = input.visits.size(); v-- > 0 && !input.update_on_device;) {
    const ScheduleVisit& visit = input.visits[v];
    if (visit.pass != Pass::kBackward || std::exchange(seen[visit.block], 1)) continue;
    if (input.blocks[visit.block].early) blocks.push_back(visit.block);
  }
  std::ranges::reverse(blocks);
  return blocks;
}

// None of the rest is read before the update, whether all of that is planned or a guess.
UpdateQueueOptions updates_of(const ScheduleInput& input) {
  UpdateQueueOptions options = input.policies.updates;
  options.early_planned = !early_blocks(input).empty();
  return options;
}

}  // namespace

ScheduleProgram::ScheduleProgram(const ScheduleInput& input)
    : UpdateTurns(updates_of(input)),
      in_(input),
      early_(early_blocks(input)),
      weights_(input.policies.weights, queue_),
      places_(weights_.places()),
      gathered_(weights_.places()),
      chunk_freed_(input.chunks, kNoOp),
      buffers_(input.policies.updates.numbers()),
      written_(input.tiles.size(), kNoOp),
      spilled_(input.tiles.size(), kNoOp),
      landed_(input.tiles.size(), kNoOp),
      gradients_(input.policies.gradients),
      staging_copied_(input.policies.gradients.staging_bytes.size(), kNoOp),
      staging_written_(input.policies.gradients.staging_bytes.size(), kNoOp),
      passing_freed_(input.policies.gradients.passing_bytes.size(), kNoOp),
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
  std::vector<std::uint32_t> last_backward(in_.blocks.size(), kNothing);
  for (std::uint32_t v = 0; v < in_.visits.size(); ++v) {
    visit_blocks_.push_back(in_.visits[v].block);
    if (in_.visits[v].pass == Pass::kBackward) last_backward[in_.visits[v].block] = v;
  }
  completes_.resize(in_.visits.size());
  for (const std::uint32_t v : last_backward) {
    if (v != kNothing) completes_[v] = 1;
  }
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
  op.seconds = seconds_of_lane(op);
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

double ScheduleProgram::seconds_of_lane(const ScheduleOp& op) const {
  switch (op.lane) {
    case Lane::kWeightReads:
    case Lane::kTileReads: return seconds_of(op.bytes, in_.rates.nvme_read);
    case Lane::kChecks: return seconds_of(op.bytes, in_.rates.checksum);
    case Lane::kWrites: return seconds_of(op.bytes, in_.rates.nvme_write);
    case Lane::kH2d: return seconds_of(op.bytes, in_.rates.h2d);
    case Lane::kD2h: return seconds_of(op.bytes, in_.rates.d2h);
    case Lane::kCompute:
    case Lane::kCaller:
    case Lane::kEarlyUpdates:
    case Lane::kNet: break;
  }
  return op.seconds;
}

std::uint32_t ScheduleProgram::add_step() {
  uses_.assign(in_.uses.size(), {});
  used_ = loads_ = 0;
  gradients_.begin_step();
  if (updating_) begin();
  if (in_.ranks > 1) gathered_.begin_step(weights_, in_.policies.weights.frozen);
  weights_.tell({.kind = WeightEvent::kBegin, .visits = visit_blocks_});
  run_weights(kNothing);
  for (std::uint32_t v = 0; v < in_.visits.size(); ++v) visit(v);
  return end_step();
}

// Engine::acquire to Lease::release.
void ScheduleProgram::visit(std::uint32_t v) {
  const ScheduleVisit& visit = in_.visits[v];
  const bool backward = visit.pass == Pass::kBackward;
  if (backward && updating_) finish_step();
  if (backward && !backward_) {
    backward_ = true;
    expect(early_);
  }
  const std::uint32_t sums = backward ? bring_sums(v) : kNoOp;
  weights_.tell({.kind = WeightEvent::kAcquire, .block = visit.block, .visit = v});
  const std::uint32_t lent = run_weights(v);
  completing_ = kNothing;
  join();
  PlaceOps& place = places_[lent];
  // Nothing more to fetch: the first tiles of this step's update come next.
  if (weights_.all_acquired() && !updating_ && !in_.update_on_device) read_ahead();

  ScheduleOp compute = of_visit(v, lent);
  compute.kind = OpKind::kCompute;
  compute.lane = Lane::kCompute;
  compute.seconds = visit.compute_seconds;
  const bool completes = completes_[v] && !in_.update_on_device;
  const bool joins = in_.blocks[visit.block].network.sums.calls > 0;  // rounded after the sum of all ranks'
  if (completes) await_gradient(visit.block);
  const std::uint32_t staging = completes && !joins ? stage_gradient(visit.block) : kNoOp;
  const std::uint32_t computed = this->compute(compute, place.ready, staging, sums);
  std::uint32_t added = computed;
  if (joins && backward) added = add_sums(v, computed);
  place.released = added;
  if (completes_[v] && joins) {
    waiting_ = {visit.block, added};
    if (in_.blocks[visit.block].accumulator_bytes > 0) join(), added = scattered_;
  } else if (completes) {
    complete_gradient(visit.block, computed);
    completing_ = visit.block;
  }
  if (backward) add_to_sums(v, added);
  weights_.tell({.kind = WeightEvent::kRelease, .place = lent});
  run_weights(kNothing);
  advance(false);  // while the device computes this visit
}

// Engine::step.
std::uint32_t ScheduleProgram::end_step() {
  if (updating_) finish_step();
  join();
  advance(true);
  if (in_.ranks > 1) add({.kind = OpKind::kMeet}, {issued_, last(Lane::kNet)});
  if (in_.update_on_device) {
    for (const std::uint32_t t : in_.policies.updates.order) {
      ScheduleOp op = of_tile(OpKind::kUpdate, Lane::kCompute, t, 0);
      op.seconds = static_cast<double>(in_.tiles[t].elements) * in_.rates.update_seconds;
      add(op, {issued_});
    }
    finish_step();
  }
  const std::uint32_t step = add({.kind = OpKind::kStep}, {issued_, last(Lane::kCompute), last(Lane::kD2h),
                                                           last(Lane::kEarlyUpdates), spills_written()});
  gradients_.copied();
  backward_ = false;
  updating_ = !in_.update_on_device;
  return step;
}

// Issues what the policy answers. Returns the place that is lent to the visit, if there is one.
std::uint32_t ScheduleProgram::run_weights(std::uint32_t v) {
  std::uint32_t lent = kNothing;
  for (WeightAction action = weights_.next(); action.kind != WeightAction::kNothing; action = weights_.next()) {
    const auto [kind, block, place] = action;
    gathered_.act(action);
    switch (kind) {
      case WeightAction::kUpdate:
      case WeightAction::kUpdateAtHome: {
        const bool at_home = kind == WeightAction::kUpdateAtHome;
        delivered_to_ = place;
        const bool brought = run_until(block, !at_home) || at_home;
        if (brought) places_[place].ready = last(Lane::kH2d), places_[place].open = kNoOp;
        weights_.tell({.kind = brought ? WeightEvent::kBrought : WeightEvent::kPassed, .block = block, .place = place});
        break;
      }
      case WeightAction::kFetch: fetch(place, block); break;
      case WeightAction::kWait: weights_.tell({.kind = WeightEvent::kArrived, .place = place}); break;
      case WeightAction::kLend: {
        ScheduleOp acquire = of_visit(v, place);
        acquire.kind = OpKind::kAcquire;
        add(acquire, {issued_, places_[place].open});
        if (in_.blocks[block].network.weights.calls > 0 && gathered_.lend(place)) gather(v, place);
        lent = place;
        break;
      }
      default: SPILLWAY_CHECK(false, "each planned visit finds a place, and what is fetched is visited");
    }
  }
  return lent;
}

ScheduleOp ScheduleProgram::of_visit(std::uint32_t v, std::uint32_t place) const {
  return {.visit = v, .block = in_.visits[v].block, .place = in_.policies.weights.at_home ? kNothing : place};
}

void ScheduleProgram::fetch(std::uint32_t index, std::uint32_t block) {
  PlaceOps& place = places_[index];
  place.open = kNoOp;
  const ScheduleBlock& of = in_.blocks[block];
  for (std::uint32_t t = of.first_tile; t < of.first_tile + of.tiles; ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.fetch_bytes > 0) {
      fetch_through_chunks(t, index);
      place.open = last(Lane::kChecks);
      continue;
    }
    ScheduleOp op = of_tile(OpKind::kCopyWeights, Lane::kH2d, t, tile.weight_bytes);
    op.place = index;
    add(op, {issued_, place.released});
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
    ScheduleOp op = of_tile(OpKind::kReadWeights, Lane::kWeightReads, t, bytes);
    op.place = place;
    op.buffer = static_cast<std::uint32_t>(chunk_ % in_.chunks);
    const std::uint32_t read = add(op, {issued_, written_[t], chunk_freed_[last_chunk % in_.chunks]});
    op.kind = OpKind::kCheckWeights;
    op.lane = Lane::kChecks;
    const std::uint32_t check = add(op, {read});
    op.kind = OpKind::kCopyWeights;
    op.lane = Lane::kH2d;
    op.bytes = payload;
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
                     .bytes = bytes},
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
  sums_[place].free = sums_at_home_[block] =
      add({.kind = OpKind::kSaveAccumulator, .lane = Lane::kD2h, .block = block, .place = place, .bytes = bytes},
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
      there = add(op, {issued_, there, coming_.free_after(op.buffer)});
    }
    op.kind = OpKind::kLoadActivation;
    op.lane = Lane::kH2d;
    op.place = planned.place;
    op.bytes = planned.bytes;
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
                .bytes = planned.bytes};
  uses_[use].home = uses_[use].left = add(op, {uses_[use].left, leaving_.free_after(op.buffer)});
  if (!nvme) return;
  op.kind = OpKind::kWriteActivation;
  op.lane = Lane::kWrites;
  op.place = kNothing;
  op.bytes = planned.nvme_bytes;
  uses_[use].home = add(op, {uses_[use].home});
  leaving_.free_by(op.buffer, uses_[use].home);
}

}  // namespace spillway
