// The part of a schedule's program that follows the Updater, the GradientCollector and the commit.
#include <algorithm>

#include "spillway/error.h"
#include "src/plan/schedule_program.h"

namespace spillway {

// Updater::run_until. True: the block's weights went to its place.
bool ScheduleProgram::run_until(std::uint32_t block, std::uint32_t place) {
  const bool delivers = queue_.delivers(block);
  while (const auto turn = queue_.next_turn(Turns::kUntil, block)) {
    take_turn(*turn, Lane::kCaller, delivers && turn->block == block ? place : kNothing);
  }
  if (queue_.under_way()) start_loads();
  return place != kNothing && delivers;
}

void ScheduleProgram::start_loads(Moves allowed) {
  while (const auto move = queue_.next_move(allowed)) {
    move->kind == TileMove::Kind::kLoad ? read_tile(move->tile, move->buffer) : read_gradient(move->tile, move->buffer);
  }
}

void ScheduleProgram::read_tile(std::uint32_t t, std::uint32_t index) {
  const ScheduleTile& tile = in_.tiles[t];
  Buffer& buffer = buffers_[index];
  buffer.read = kNoOp;
  queue_.tell(QueueEvent::kRead, index);  // an update of it starts no earlier than it has been
  if (tile.read_bytes == 0) return;
  buffer.read = add({.kind = OpKind::kReadTile,
                     .lane = Lane::kTileReads,
                     .block = tile.block,
                     .tile = t,
                     .buffer = index,
                     .bytes = tile.read_bytes,
                     .seconds = seconds_of(tile.read_bytes, in_.rates.nvme_read)},
                    {issued_, buffer.left(), buffer.copy, written_[t]});
}

// A spilled gradient is read once all of the step have been written.
void ScheduleProgram::read_gradient(std::uint32_t t, std::uint32_t index) {
  const ScheduleTile& tile = in_.tiles[t];
  if (tile.spill_bytes == 0) return;
  Buffer& buffer = buffers_[index];
  buffer.read = add({.kind = OpKind::kReadGradient,
                     .lane = Lane::kTileReads,
                     .block = tile.block,
                     .tile = t,
                     .buffer = index,
                     .bytes = tile.spill_bytes,
                     .seconds = seconds_of(tile.spill_bytes, in_.rates.nvme_read)},
                    {issued_, buffer.write, buffer.copy, spilled_[t], buffer.read});
}

void ScheduleProgram::take_turn(const TileTurn& turn, Lane lane, std::uint32_t place) {
  start_loads();
  for (std::size_t i = turn.first; i < turn.first + turn.count; ++i) {
    update(queue_.tile(i), queue_.buffer(i), lane, place);
    const TileEnd end = queue_.end_tile(i, true, false);
    const Buffer& buffer = buffers_[queue_.buffer(i)];
    if (end == TileEnd::kSaveNow) add({.kind = OpKind::kSettle, .lane = lane}, {issued_, buffer.write, buffer.copy});
    queue_.tell(QueueEvent::kWritten, queue_.buffer(i));  // a read into it starts no earlier than it is
  }
  queue_.tell(QueueEvent::kTurnDone);
}

void ScheduleProgram::update(std::uint32_t t, std::uint32_t index, Lane lane, std::uint32_t place) {
  const ScheduleTile& tile = in_.tiles[t];
  Buffer& buffer = buffers_[index];
  ScheduleOp op{.kind = OpKind::kUpdate,
                .lane = lane,
                .block = tile.block,
                .tile = t,
                .buffer = index,
                .seconds = static_cast<double>(tile.elements) * in_.rates.update_seconds};
  const std::uint32_t landed = lane == Lane::kEarlyUpdates ? landed_[t] : kNoOp;
  const std::uint32_t updated = add(op, {issued_, buffer.read, buffer.left(), buffer.copy, landed});
  buffer = {.updated = updated};
  if (place != kNothing || (in_.weights_stay && tile.weight_bytes > 0)) {
    op.kind = OpKind::kCopyWeights;
    op.lane = Lane::kH2d;
    op.place = place;
    op.bytes = tile.weight_bytes;
    op.seconds = seconds_of(op.bytes, in_.rates.h2d);
    buffer.copy = add(op, {updated, place == kNothing ? kNoOp : places_[place].released});
  }
  if (tile.write_bytes > 0) {
    op.kind = OpKind::kWriteTile;
    op.lane = Lane::kWrites;
    op.place = kNothing;
    op.bytes = tile.write_bytes;
    op.seconds = seconds_of(op.bytes, in_.rates.nvme_write);
    buffer.write = written_[t] = add(op, {updated});
  }
}

// Engine::settle.
void ScheduleProgram::settle() {
  while (const auto turn = queue_.next_turn(Turns::kRest)) take_turn(*turn, Lane::kCaller, kNothing);
  std::uint32_t write = kNoOp, copy = kNoOp;  // the last ones: their lanes are first in, first out
  for (const Buffer& buffer : buffers_) {
    if (buffer.write != kNoOp) write = write == kNoOp ? buffer.write : std::max(write, buffer.write);
    if (buffer.copy != kNoOp) copy = copy == kNoOp ? buffer.copy : std::max(copy, buffer.copy);
  }
  add({.kind = OpKind::kSettle}, {issued_, write, copy, in_.update_on_device ? last(Lane::kCompute) : kNoOp});
  queue_.tell(QueueEvent::kEnd);
  updating_ = false;
  if (in_.commits) commit();
}

// Engine::commit: what no update wrote goes to its slot now.
void ScheduleProgram::commit() {
  std::uint32_t used = 0;
  for (std::uint32_t t = 0; t < in_.tiles.size(); ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.commit_bytes == 0) continue;
    const auto index = static_cast<std::uint32_t>(used++ % buffers_.size());
    Buffer& buffer = buffers_[index];
    ScheduleOp op{.block = tile.block, .tile = t, .buffer = index};
    std::uint32_t here = kNoOp;
    if (tile.commit_d2h_bytes > 0) {
      op.kind = OpKind::kCopyTile;
      op.lane = Lane::kD2h;
      op.bytes = tile.commit_d2h_bytes;
      op.seconds = seconds_of(op.bytes, in_.rates.d2h);
      here = add(op, {issued_, buffer.left(), buffer.copy});
    }
    std::uint32_t read = kNoOp;
    if (tile.commit_read_bytes > 0) {
      op.kind = OpKind::kReadTile;
      op.lane = Lane::kTileReads;
      op.bytes = tile.commit_read_bytes;
      op.seconds = seconds_of(op.bytes, in_.rates.nvme_read);
      read = add(op, {issued_, buffer.left(), buffer.copy, written_[t]});
    }
    op.kind = OpKind::kHashTile;
    op.lane = Lane::kCaller;
    op.bytes = tile.commit_bytes;
    op.seconds = seconds_of(op.bytes, in_.rates.checksum * in_.rates.cores);
    const std::uint32_t hashed = add(op, {issued_, here, read, buffer.left(), buffer.copy});
    op.kind = OpKind::kWriteTile;
    op.lane = Lane::kWrites;
    op.seconds = seconds_of(op.bytes, in_.rates.nvme_write);
    buffer = {};
    buffer.write = written_[t] = add(op, {hashed});
  }
  add({.kind = OpKind::kCommit, .seconds = in_.rates.sync_seconds}, {issued_, last(Lane::kWrites)});
}

// The next in turn that is large enough.
std::uint32_t ScheduleProgram::take_staging(std::uint32_t block) {
  const auto count = static_cast<std::uint32_t>(in_.staging_bytes.size());
  if (count == 0) return kNothing;
  std::uint32_t index = next_staging_;
  for (std::uint32_t i = 0; i < count && in_.staging_bytes[index] < in_.blocks[block].gradient_bytes; ++i) {
    index = (index + 1) % count;
  }
  next_staging_ = (index + 1) % count;
  return staging_of_[block] = index;
}

// The last free one that is large enough: only the first holds the largest. With none free the caller updates a block
// whose gradient lies in one. What comes there waits for the update that used it last.
void ScheduleProgram::take_passing(std::uint32_t block) {
  if (!in_.blocks[block].gradient_passes || in_.blocks[block].gradient_bytes == 0) return;
  for (;;) {
    for (std::size_t i = passing_.size(); i-- > 0;) {
      if (passing_[i] != kNothing || in_.passing_bytes[i] < in_.blocks[block].gradient_bytes) continue;
      passing_[i] = block;
      passing_of_[block] = static_cast<std::uint32_t>(i);
      return;
    }
    const auto first = queue_.early_block();
    SPILLWAY_CHECK(first, "the first passing memory takes any gradient");
    update_early(Turns::kEarlyOf, *first);
    issued_ = last(Lane::kEarlyUpdates);
  }
}

void ScheduleProgram::complete_gradient(std::uint32_t b, std::uint32_t computed) {
  const ScheduleBlock& block = in_.blocks[b];
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.elements == 0) continue;
    if (tile.gradient_bytes == 0) continue;
    if (tile.spill_bytes > 0) {
      spill_gradient(t, computed);
    } else {
      landed_[t] = copy_gradient(t, computed);
    }
  }
  if (!block.early) return;
  queue_.tell(QueueEvent::kComplete, b);
  start_loads();
}

std::uint32_t ScheduleProgram::copy_gradient(std::uint32_t t, std::uint32_t computed) {
  const ScheduleTile& tile = in_.tiles[t];
  const std::uint32_t staging = staging_of_[tile.block], passing = passing_of_[tile.block];
  const std::uint32_t copy = add({.kind = OpKind::kCopyGradient,
                                  .lane = Lane::kD2h,
                                  .block = tile.block,
                                  .tile = t,
                                  .place = staging,
                                  .buffer = passing,
                                  .bytes = tile.gradient_bytes,
                                  .seconds = seconds_of(tile.gradient_bytes, in_.rates.d2h)},
                                 {computed, passing == kNothing ? kNoOp : passing_freed_[passing]});
  if (staging != kNothing) staging_freed_[staging] = copy;
  return copy;
}

// As fetch_through_chunks(), the other way.
void ScheduleProgram::spill_gradient(std::uint32_t t, std::uint32_t computed) {
  SPILLWAY_CHECK(in_.spill_chunks > 0 && in_.chunk_bytes > 0, "gradients are spilled through chunks");
  const ScheduleTile& tile = in_.tiles[t];
  const std::uint32_t staging = staging_of_[tile.block];
  const std::uint64_t piece_bytes = std::max(in_.spill_chunks / 2, 1u) * in_.chunk_bytes;
  for (std::uint64_t done = 0; done < tile.spill_bytes; done += piece_bytes) {
    const std::uint64_t bytes = std::min(piece_bytes, tile.spill_bytes - done);
    const std::uint64_t payload = std::min(bytes, tile.gradient_bytes - std::min(done, tile.gradient_bytes));
    const std::uint64_t last_chunk = spill_chunk_ + div_up(bytes, in_.chunk_bytes) - 1;
    ScheduleOp op{.kind = OpKind::kCopyGradient,
                  .lane = Lane::kD2h,
                  .block = tile.block,
                  .tile = t,
                  .place = staging,
                  .buffer = static_cast<std::uint32_t>(spill_chunk_ % in_.spill_chunks),
                  .bytes = payload,
                  .seconds = seconds_of(payload, in_.rates.d2h)};
    const std::uint32_t copy = add(op, {computed, spill_freed_[last_chunk % in_.spill_chunks]});
    if (staging != kNothing) staging_freed_[staging] = copy;
    op.kind = OpKind::kSpillGradient;
    op.lane = Lane::kWrites;
    op.place = kNothing;
    op.bytes = bytes;
    op.seconds = seconds_of(bytes, in_.rates.nvme_write);
    spilled_[t] = add(op, {copy});
    for (; spill_chunk_ <= last_chunk; ++spill_chunk_) spill_freed_[spill_chunk_ % in_.spill_chunks] = spilled_[t];
  }
}

// What the gradients of the blocks lay in is free behind it.
void ScheduleProgram::update_early(Turns which, std::uint32_t block) {
  while (const auto turn = queue_.next_turn(which, block)) {
    take_turn(*turn, Lane::kEarlyUpdates, kNothing);
    if (const std::uint32_t passing = passing_of_[turn->block]; turn->ends_block && passing != kNothing) {
      passing_[passing] = kNothing;
      passing_freed_[passing] = last(Lane::kEarlyUpdates);
    }
    start_loads();
  }
}

}  // namespace spillway
