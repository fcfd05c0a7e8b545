#include "src/engine/tile_executor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "swap/tile_arrays.h"

namespace spillway {
namespace {

// Of the tile's first element in the weights of its block.
std::uint64_t offset_in_block(const Plan& plan, std::uint32_t tile) {
  return plan.tiles[tile].range.first * size_of(plan.tile_places[tile].shape.type);
}
std::uint64_t offset_in_gradient(const Plan& plan, std::uint32_t tile) {
  return plan.tiles[tile].gradient_first * size_of(plan.tile_places[tile].shape.type);
}

}  // namespace

Error update_overflow(const std::string& where) {
  return Error(Code::kNonFinite, {where, "a weight or optimizer state overflowed in the update", 0,
                                  "lower the learning rate or clip gradients; the last committed step is intact"});
}

TileExecutor::TileExecutor(const Plan& plan, const ModelDescription& model, const UpdateQueueOptions& queue,
                           HostWorkers& workers, TileMover& mover, GradientCollector& gradients, Watch watch)
    : UpdateTurns(queue),
      plan_(plan),
      model_(model),
      workers_(workers),
      mover_(mover),
      gradients_(gradients),
      watch_(watch),
      nodes_(queue.nodes),
      updates_(nodes_),
      ranges_(nodes_),
      memories_(nodes_),
      finite_(nodes_) {
  std::size_t most = 0;
  for (const Block& block : model.blocks) most = std::max(most, block.parameters.size());
  for (std::vector<GroupRange>& ranges : ranges_) ranges.reserve(most);
}

void TileExecutor::make(const TileMove& move) {
  switch (move.kind) {
    case TileMove::Kind::kLoad: return mover_.start_load(move.tile, move.buffer);
    // A gradient that was not spilled lies where the update reads it: then there is nothing to bring.
    case TileMove::Kind::kGradient:
      if (const auto spilled = gradients_.spilled(move.tile))
        mover_.load_gradient(move.buffer, spilled->extent, spilled->checksum);
      return;
    case TileMove::Kind::kDrop:  // what is not used need not be verified
      mover_.arrive(move.buffer);
      return mover_.drop(move.buffer);
  }
}

std::optional<QueueEvent> TileExecutor::landing(std::uint32_t block, bool wait) {
  if (wait) gradients_.wait_landed(block);
  if (!gradients_.landed(block)) return std::nullopt;
  return gradients_.finite(block) ? QueueEvent::kLanded : QueueEvent::kNotFinite;
}

// The drive has more to do as soon as a buffer is free again.
void TileExecutor::wait_read(std::uint32_t buffer) {
  const StallMeter::Wait wait(watch_.stalls, StallCause::kRead);
  for (;;) {
    // Asked first: a request that completes while loads start ends the wait below at once.
    const std::uint64_t completed = mover_.completed();
    start_loads();
    if (mover_.read(buffer)) return;
    mover_.wait_completed_beyond(completed);
  }
}

void TileExecutor::cancel_read_ahead() {
  queue_.tell(QueueEvent::kCancel);
  make_moves(Moves::kDrops);
}

void TileExecutor::reset() {
  mover_.finish_saves();
  queue_.tell(QueueEvent::kEnd);
  tour_work_ = nullptr;
}

bool TileExecutor::run_until(std::uint32_t block, std::byte* to) {
  to_ = to;
  return UpdateTurns::run_until(block, to != nullptr);
}

void TileExecutor::begin_tour(TileWork work) {
  queue_.tell(QueueEvent::kTour);
  make_moves(Moves::kDrops);
  mover_.finish_saves();  // of tiles that are read again
  tour_work_ = std::move(work);
  start_loads();
}

void TileExecutor::tour_until(std::uint32_t block) {
  while (const auto turn = queue_.next_turn(Turns::kShown, block)) take_turn(*turn, false);
}

void TileExecutor::visit(std::uint32_t tile, const TileMemory& memory) {
  if (!tour_work_ || show_failure_) return;
  try {
    tour_work_(tile, memory);
  } catch (...) {
    // The caller's own failure. It waits until the tile in hand is ended, as saves must not be lost.
    show_failure_ = std::current_exception();
  }
}

void TileExecutor::work_on(const TileTurn& turn, bool delivers) {
  std::byte* const to = delivers ? to_ : nullptr;
  if (turn.kind == TileTurn::Kind::kUpdate) update(turn, to);
  const bool verified = turn.kind == TileTurn::Kind::kVisit || turn.kind == TileTurn::Kind::kCheck;
  for (std::size_t i = turn.first; verified && i < turn.first + turn.count; ++i) {
    wait_read(queue_.buffer(i));
    visit(queue_.tile(i), mover_.finish_load(queue_.buffer(i)));
    end_tile(i, true, to);
  }
  if (!tour_work_ || !show_failure_) return;
  tour_work_ = nullptr;
  queue_.tell(QueueEvent::kEndTour);
}

// The bytes are verified in the pass that updates them: a mismatch is found after the pass and before anything of the
// tile is saved.
void TileExecutor::prepare(std::size_t node, std::uint32_t tile, std::uint32_t buffer) {
  wait_read(buffer);
  const TileMemory& memory = memories_[node] = mover_.arrive(buffer);
  const ExtentHashes spilled = mover_.expected_gradient(buffer);
  const std::byte* gradient = spilled.bytes.empty()
                                  ? gradients_.gradient(plan_.tiles[tile].block) + offset_in_gradient(plan_, tile)
                                  : spilled.bytes.data();
  // Everything the kernel needs is put together here; no lookup happens in the pass over memory.
  updates_[node] = {.tile = tile_arrays(plan_.tile_places[tile].shape, memory, gradient),
                    .groups = parameters_->ranges(tile, ranges_[node]),
                    .scalars = parameters_->scalars(),
                    .weights = mover_.expected_hashes(buffer, Part::kWeights, Save::kUpdated),
                    .states = mover_.expected_hashes(buffer, Part::kStates, Save::kUpdated),
                    .gradient = spilled};
}

// One tile for each node.
void TileExecutor::update(const TileTurn& turn, std::byte* to) {
  for (std::size_t node = 0; node < turn.count; ++node) {
    prepare(node, queue_.tile(turn.first + node), queue_.buffer(turn.first + node));
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
    // Only now are the bytes known to be right. Nothing has left the buffer yet, so a mismatch still harms nothing.
    mover_.verify(queue_.buffer(turn.first + node));
    if (finite_[node] != 0) visit(queue_.tile(turn.first + node), memories_[node]);
    end_tile(turn.first + node, finite_[node] != 0, to);
  }
}

void TileExecutor::end_tile(std::size_t position, bool finite, std::byte* to) {
  const std::uint32_t tile = queue_.tile(position), buffer = queue_.buffer(position);
  std::byte* const delivered = to ? to + offset_in_block(plan_, tile) : nullptr;
  switch (queue_.end_tile(position, finite, to != nullptr)) {
    case TileEnd::kRefuse: refuse_overflow(tile);
    case TileEnd::kDrop: return mover_.drop(buffer);
    case TileEnd::kRestored: return mover_.start_save(buffer, Save::kRestored, delivered);
    case TileEnd::kSave: return mover_.start_save(buffer, Save::kUpdated, delivered);
    case TileEnd::kSaveNow: mover_.start_save(buffer, Save::kUpdated, delivered); return mover_.finish_save(buffer);
  }
}

void TileExecutor::refuse_overflow(std::uint32_t tile) {
  overflowed_ = true;
  throw update_overflow(tile_name(plan_, model_, tile));
}

}  // namespace spillway
