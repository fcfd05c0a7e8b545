#include "src/engine/updater.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "spillway/error.h"
#include "src/checkpoint/tile_values.h"
#include "src/plan/node_tiles.h"

namespace spillway {
namespace {

UpdateQueueOptions update_queue_options(const Plan& plan, std::span<const std::uint32_t> order, std::uint32_t buffers,
                                        unsigned nodes) {
  UpdateQueueOptions options{.order = {order.begin(), order.end()},
                             .buffers = buffers,
                             .nodes = nodes,
                             .reads_ahead = plan.host.reads_ahead,
                             .writes_behind = plan.host.writes_behind,
                             .early_planned = plan.early_blocks};
  for (const BlockPlan& block : plan.blocks) options.blocks.push_back({block.first_tile, block.tiles});
  for (const TilePlan& tile : plan.tiles) options.trainable.push_back(tile.range.trainable);
  for (const std::uint32_t tile : order) {
    if (!resident(plan.tile_places[tile])) options.checked.push_back(tile);
  }
  return options;
}

}  // namespace

Updater::Updater(const Plan& plan, const ModelDescription& model, Device& device, HostWorkers& workers,
                 TileMover& mover, GradientCollector& gradients, Stream& stream, Watch watch)
    : plan_(plan),
      model_(model),
      device_(device),
      workers_(workers),
      mover_(mover),
      gradients_(gradients),
      stream_(stream),
      watch_(watch),
      nodes_(updating_nodes(plan, workers.nodes())),
      order_(update_order(plan, nodes_)),
      queue_(update_queue_options(plan, order_, mover.buffers(), nodes_)),
      updates_(nodes_),
      ranges_(nodes_),
      memories_(nodes_),
      finite_(nodes_) {
  std::size_t most = 0;
  for (const Block& block : model.blocks) most = std::max(most, block.parameters.size());
  for (std::vector<GroupRange>& ranges : ranges_) ranges.reserve(most);
}

void Updater::make(const TileMove& move) {
  switch (move.kind) {
    case TileMove::Kind::kLoad: return mover_.start_load(move.tile, move.buffer);
    case TileMove::Kind::kGradient:
      if (const auto spilled = gradients_.spilled(move.tile))
        mover_.load_gradient(move.buffer, spilled->extent, spilled->checksum);
      return;
    case TileMove::Kind::kDrop:  // what is not used need not be verified
      mover_.arrive(move.buffer);
      return mover_.drop(move.buffer);
  }
}

void Updater::make_moves(Moves allowed) {
  while (const auto move = queue_.next_move(allowed)) make(*move);
}

// Until the next load has to wait for its buffer's save.
void Updater::start_loads() {
  for (;;) {
    make_moves(Moves::kAll);
    const auto buffer = queue_.saving();
    if (!buffer || !mover_.idle(*buffer)) return;
    queue_.tell(QueueEvent::kWritten, *buffer);
  }
}

// The drive has more to do as soon as a buffer is free again.
void Updater::wait_read(std::uint32_t buffer) {
  const StallMeter::Wait wait(watch_.stalls, StallCause::kRead);
  for (;;) {
    const std::uint64_t completed = mover_.completed();
    start_loads();
    if (mover_.read(buffer)) return;
    mover_.wait_completed_beyond(completed);
  }
}

void Updater::read_ahead() {
  if (plan_.gradients_in_hbm) return;
  queue_.tell(QueueEvent::kFetched);
  start_loads();
}

void Updater::cancel_read_ahead() {
  queue_.tell(QueueEvent::kCancel);
  make_moves(Moves::kDrops);
}

void Updater::finish_saves() {
  for (std::uint32_t b = 0; b < mover_.buffers(); ++b) mover_.finish_save(b);
}

void Updater::expect(std::span<const std::uint32_t> blocks) {
  if (queue_.expect(blocks)) start_loads();
}

void Updater::add(std::uint32_t block, const ParameterUpdates& parameters) {
  parameters_ = &parameters;
  queue_.tell(QueueEvent::kComplete, block);
  start_loads();
}

void Updater::advance(bool all) {
  while (const auto block = queue_.early_block()) {
    if (all) gradients_.wait_landed(*block);
    if (!gradients_.landed(*block)) return;
    queue_.tell(gradients_.finite(*block) ? QueueEvent::kLanded : QueueEvent::kNotFinite, *block);
    if (!all) start_loads();
    if (const auto buffer = queue_.reading(); buffer && mover_.read(*buffer)) queue_.tell(QueueEvent::kRead, *buffer);
    const auto turn = queue_.next_turn(all ? Turns::kEarlyAll : Turns::kEarly);
    if (!turn) return;
    update_early(*turn);
  }
}

bool Updater::make_room() {
  const auto block = queue_.early_block();
  if (!block) return false;
  gradients_.wait_landed(*block);
  queue_.tell(gradients_.finite(*block) ? QueueEvent::kLanded : QueueEvent::kNotFinite, *block);
  while (const auto turn = queue_.next_turn(Turns::kEarlyOf, *block)) update_early(*turn);
  return true;
}

void Updater::update_early(const TileTurn& turn) {
  take_turn(turn, nullptr);
  if (turn.ends_block) gradients_.forget(turn.block);
  start_loads();
}

bool Updater::keep_early(bool right) {
  if (!early_under_way()) return true;
  if (right) advance(true);
  // A result that is not finite is for begin() to refuse.
  if (right && (!queue_.stopped() || plan_.early_blocks)) return true;
  take_back();
  return false;
}

void Updater::take_back() {
  cancel_read_ahead();
  finish_saves();
  if (queue_.touched()) mover_.forget_written();
  queue_.tell(QueueEvent::kEnd);
  look_ = nullptr;
}

void Updater::begin(const ParameterUpdates& parameters) {
  if (plan_.gradients_in_hbm) return run_on_device(parameters);
  if (queue_.overflow()) refuse_overflow(tile_name(plan_, model_, *queue_.overflow()));
  parameters_ = &parameters;
  queue_.tell(QueueEvent::kBegin);
  make_moves(Moves::kGradients);
}

void Updater::begin_check() {
  queue_.tell(QueueEvent::kBeginCheck);
  start_loads();
}

bool Updater::run_until(std::uint32_t block, std::byte* to) {
  const bool delivers = to != nullptr && queue_.delivers(block);
  while (const auto turn = queue_.next_turn(Turns::kUntil, block)) {
    take_turn(*turn, delivers && turn->block == block ? to : nullptr);
  }
  if (queue_.under_way()) start_loads();
  return delivers;
}

void Updater::settle(std::uint32_t block) {
  const BlockPlan& plan = plan_.blocks[block];
  mover_.finish_saves_of(plan.first_tile, plan.first_tile + plan.tiles);
}

std::exception_ptr Updater::finish() {
  while (const auto turn = queue_.next_turn(Turns::kRest)) take_turn(*turn, nullptr);
  finish_saves();
  queue_.tell(QueueEvent::kEnd);
  look_ = nullptr;
  return std::exchange(look_failure_, nullptr);
}

void Updater::look(TileWork work) {
  queue_.tell(QueueEvent::kLook);
  make_moves(Moves::kDrops);
  finish_saves();  // of tiles that are read again
  look_ = std::move(work);
  start_loads();
}

void Updater::show_until(std::uint32_t block) {
  while (const auto turn = queue_.next_turn(Turns::kShown, block)) take_turn(*turn, nullptr);
}

void Updater::end_look() {
  look_ = nullptr;
  queue_.tell(QueueEvent::kEndLook);
  make_moves(Moves::kDrops);
}

void Updater::show(std::uint32_t tile, const TileMemory& memory) {
  if (!look_) return;
  try {
    look_(tile, memory);
  } catch (...) {
    look_failure_ = std::current_exception();
  }
}

void Updater::take_turn(const TileTurn& turn, std::byte* to) {
  if (turn.kind == TileTurn::Kind::kPassOver) {
    make_moves(Moves::kDrops);
  } else {
    start_loads();
  }
  if (turn.kind == TileTurn::Kind::kUpdate) update(turn, to);
  const bool verified = turn.kind == TileTurn::Kind::kShow || turn.kind == TileTurn::Kind::kCheck;
  for (std::size_t i = turn.first; verified && i < turn.first + turn.count; ++i) {
    wait_read(queue_.buffer(i));
    show(queue_.tile(i), mover_.finish_load(queue_.buffer(i)));
    end_tile(i, true, to);
  }
  queue_.tell(QueueEvent::kTurnDone);
  make_moves(Moves::kDrops);
  if (look_ && look_failure_) end_look();
}

// One tile for each node. The bytes are verified in the pass that updates them: a mismatch is found after the pass and
// before anything of the tile is saved.
void Updater::update(const TileTurn& turn, std::byte* to) {
  for (std::size_t node = 0; node < turn.count; ++node) {
    const std::uint32_t t = queue_.tile(turn.first + node), buffer = queue_.buffer(turn.first + node);
    wait_read(buffer);
    const TileMemory& memory = memories_[node] = mover_.arrive(buffer);
    const ExtentHashes spilled = mover_.expected_gradient(buffer);
    const std::byte* gradient =
        spilled.bytes.empty() ? gradients_.gradient(plan_.tiles[t].block) + byte_offset(t) : spilled.bytes.data();
    updates_[node] = {.tile = tile_arrays(plan_.tile_places[t].shape, memory, gradient),
                      .groups = parameters_->ranges(t, ranges_[node]),
                      .scalars = parameters_->scalars(),
                      .weights = mover_.expected_hashes(buffer, Part::kWeights, Save::kUpdated),
                      .states = mover_.expected_hashes(buffer, Part::kStates, Save::kUpdated),
                      .gradient = spilled};
  }
  {
    const StallMeter::Wait wait(watch_.stalls, StallCause::kUpdate);
    const auto start = std::chrono::steady_clock::now();
    const auto update_one = [&](std::size_t node) {
      const TimedSpan span(watch_.timeline, SpanKind::kUpdate, queue_.tile(turn.first + node));
      finite_[node] = update_tile(updates_[node], workers_);
    };
    if (nodes_ == 1) {
      update_one(0);
    } else {
      workers_.parallel_for_nodes(turn.count, update_one);
    }
    adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  for (std::size_t node = 0; node < turn.count; ++node) {
    mover_.verify(queue_.buffer(turn.first + node));
    if (finite_[node] != 0) show(queue_.tile(turn.first + node), memories_[node]);
    end_tile(turn.first + node, finite_[node] != 0, to);
  }
}

void Updater::end_tile(std::size_t position, bool finite, std::byte* to) {
  const std::uint32_t tile = queue_.tile(position), buffer = queue_.buffer(position);
  std::byte* const delivered = to ? to + byte_offset(tile) : nullptr;
  switch (queue_.end_tile(position, finite, to != nullptr)) {
    case TileEnd::kRefuse: refuse_overflow(tile_name(plan_, model_, tile));
    case TileEnd::kDrop: return mover_.drop(buffer);
    case TileEnd::kRestored: return mover_.start_save(buffer, Save::kRestored, delivered);
    case TileEnd::kSave: return mover_.start_save(buffer, Save::kUpdated, delivered);
    case TileEnd::kSaveNow: mover_.start_save(buffer, Save::kUpdated, delivered); return mover_.finish_save(buffer);
  }
}

void Updater::run_on_device(const ParameterUpdates& parameters) {
  const auto start = std::chrono::steady_clock::now();
  auto* finite = reinterpret_cast<std::uint32_t*>(device_.hbm().data() + plan_.hbm.finite.offset);
  device_.fill_async(finite, std::byte{1}, sizeof *finite, stream_);
  for (std::uint32_t t : order_) {
    const TilePlace& place = plan_.tile_places[t];
    TileMemory memory;
    for (std::size_t part = 0; part < kParts; ++part) memory.part[part] = device_.hbm().data() + place.offset[part];
    const std::byte* gradient = gradients_.gradient(plan_.tiles[t].block) + byte_offset(t);
    const StreamSpan span(watch_.timeline, {.kind = SpanKind::kUpdate, .subject = t}, stream_);
    std::uint64_t begin = 0;
    for (const GroupRange& range : parameters.ranges(t, ranges_[0])) {
      if (range.group != kNotUpdated) {
        device_.update_async(tile_arrays(place.shape, memory, gradient), parameters.scalars()[range.group], begin,
                             range.end, finite, stream_);
      }
      begin = range.end;
    }
  }
  auto* flag = reinterpret_cast<std::uint32_t*>(mover_.host().data() + plan_.host.overflow.offset);
  device_.copy_async(CopyKind::kDeviceToHost, flag, finite, sizeof *flag, stream_);
  stream_.synchronize();
  adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (*flag == 0) refuse_overflow("the device update");
}

std::uint64_t Updater::byte_offset(std::uint32_t tile) const {
  return plan_.tiles[tile].range.first * size_of(plan_.tile_places[tile].shape.type);
}

void Updater::refuse_overflow(const std::string& where) {
  overflowed_ = true;
  throw Error(Code::kNonFinite, {where, "a weight or optimizer state overflowed in the update", 0,
                                 "lower the learning rate or clip gradients; the last committed step is intact"});
}

}  // namespace spillway
