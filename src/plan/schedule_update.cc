// The part of a schedule's program that follows the Updater, the GradientCollector and the commit.
#include <algorithm>

#include "spillway/error.h"
#include "src/plan/schedule_program.h"

namespace spillway {

void ScheduleProgram::make(const TileMove& move) {
  if (move.kind == TileMove::Kind::kLoad) read_tile(move.tile, move.buffer);
  if (move.kind == TileMove::Kind::kGradient) read_gradient(move.tile, move.buffer);
}

// A gradient has landed when the caller comes by again.
std::optional<QueueEvent> ScheduleProgram::landing(std::uint32_t block, bool wait) {
  if (block == completing_ && !wait) return std::nullopt;
  return QueueEvent::kLanded;
}

void ScheduleProgram::read_tile(std::uint32_t t, std::uint32_t index) {
  const ScheduleTile& tile = in_.tiles[t];
  Buffer& buffer = buffers_[index];
  buffer.read = kNoOp;
  if (tile.read_bytes == 0) return;
  ScheduleOp op = of_tile(OpKind::kReadTile, Lane::kTileReads, t, tile.read_bytes);
  op.buffer = index;
  buffer.read = add(op, {issued_, buffer.left(), buffer.copy, written_[t]});
}

// A spilled gradient is read once all of the step have been written.
void ScheduleProgram::read_gradient(std::uint32_t t, std::uint32_t index) {
  const ScheduleTile& tile = in_.tiles[t];
  if (tile.spill_bytes == 0) return;
  Buffer& buffer = buffers_[index];
  ScheduleOp op = of_tile(OpKind::kReadGradient, Lane::kTileReads, t, tile.spill_bytes);
  op.buffer = index;
  buffer.read = add(op, {issued_, buffer.write, buffer.copy, spilled_[t], buffer.read});
}

void ScheduleProgram::work_on(const TileTurn& turn, bool delivers) {
  const Lane lane = queue_.begun() ? Lane::kCaller : Lane::kEarlyUpdates;
  for (std::size_t i = turn.first; i < turn.first + turn.count; ++i) {
    update(queue_.tile(i), queue_.buffer(i), lane, delivers ? delivered_to_ : kNothing);
    const TileEnd end = queue_.end_tile(i, true, false);
    const Buffer& buffer = buffers_[queue_.buffer(i)];
    if (end == TileEnd::kSaveNow)
      add({.kind = OpKind::kFinishStep, .lane = lane}, {issued_, buffer.write, buffer.copy});
  }
}

void ScheduleProgram::update(std::uint32_t t, std::uint32_t index, Lane lane, std::uint32_t place) {
  const ScheduleTile& tile = in_.tiles[t];
  Buffer& buffer = buffers_[index];
  ScheduleOp op = of_tile(OpKind::kUpdate, lane, t, 0);
  op.buffer = index;
  op.seconds = static_cast<double>(tile.elements) * in_.rates.update_seconds;
  const std::uint32_t landed = lane == Lane::kEarlyUpdates ? landed_[t] : kNoOp;
  const std::uint32_t updated = add(op, {issued_, buffer.read, buffer.left(), buffer.copy, landed});
  buffer = {.updated = updated};
  if (place != kNothing || (in_.policies.weights.at_home && tile.weight_bytes > 0)) {
    op.kind = OpKind::kCopyWeights;
    op.lane = Lane::kH2d;
    op.place = place;
    op.bytes = tile.weight_bytes;
    buffer.copy = add(op, {updated, place == kNothing ? kNoOp : places_[place].released});
  }
  if (tile.write_bytes > 0) {
    op.kind = OpKind::kWriteTile;
    op.lane = Lane::kWrites;
    op.place = kNothing;
    op.bytes = tile.write_bytes;
    buffer.write = written_[t] = add(op, {updated});
  }
}

// StepEngine::finish_step.
void ScheduleProgram::finish_step() {
  run_rest();
  std::uint32_t write = kNoOp, copy = kNoOp;  // the last ones: their lanes are first in, first out
  for (const Buffer& buffer : buffers_) {
    if (buffer.write != kNoOp) write = write == kNoOp ? buffer.write : std::max(write, buffer.write);
    if (buffer.copy != kNoOp) copy = copy == kNoOp ? buffer.copy : std::max(copy, buffer.copy);
  }
  add({.kind = OpKind::kFinishStep}, {issued_, write, copy, in_.update_on_device ? last(Lane::kCompute) : kNoOp});
  queue_.tell(QueueEvent::kEnd);
  updating_ = false;
  agree(1);
  if (in_.commits) commit();
}

// All ranks have come so far.
void ScheduleProgram::agree(std::uint64_t calls) {
  if (in_.ranks == 1) return;
  const std::uint32_t agreed = collective(OpKind::kAgree, kNothing, {.calls = calls}, {issued_});
  add({.kind = OpKind::kMeet}, {issued_, agreed});
}

// Engine::commit: what no update wrote goes to its slot now.
void ScheduleProgram::commit() {
  std::uint32_t used = 0;
  for (std::uint32_t t = 0; t < in_.tiles.size(); ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.commit_bytes == 0) continue;
    const auto index = used++ % in_.policies.updates.buffers;
    Buffer& buffer = buffers_[index];
    const auto in_buffer = [&](OpKind kind, Lane lane, std::uint64_t bytes) {
      ScheduleOp op = of_tile(kind, lane, t, bytes);
      op.buffer = index;
      return op;
    };
    std::uint32_t here = kNoOp;
    if (tile.commit_d2h_bytes > 0) {
      here =
          add(in_buffer(OpKind::kCopyTile, Lane::kD2h, tile.commit_d2h_bytes), {issued_, buffer.left(), buffer.copy});
    }
    std::uint32_t read = kNoOp;
    if (tile.commit_read_bytes > 0) {
      read = add(in_buffer(OpKind::kReadTile, Lane::kTileReads, tile.commit_read_bytes),
                 {issued_, buffer.left(), buffer.copy, written_[t]});
    }
    ScheduleOp hash = in_buffer(OpKind::kHashTile, Lane::kCaller, tile.commit_bytes);
    hash.seconds = seconds_of(tile.commit_bytes, in_.rates.checksum * in_.rates.cores);
    const std::uint32_t hashed = add(hash, {issued_, here, read, buffer.left(), buffer.copy});
    buffer = {};
    buffer.write = written_[t] = add(in_buffer(OpKind::kWriteTile, Lane::kWrites, tile.commit_bytes), {hashed});
  }
  add({.kind = OpKind::kCommit, .seconds = in_.rates.sync_seconds}, {issued_, last(Lane::kWrites)});
  agree(2);  // on that, and on what it took
}

// With no room where it passes, the caller updates a block whose gradient lies there, and what comes there waits for
// that.
void ScheduleProgram::await_gradient(std::uint32_t block) {
  if (in_.policies.gradients.blocks[block].bytes == 0) return;
  while (!gradients_.has_room(block)) {
    const bool made = make_room();
    SPILLWAY_CHECK(made, "the first passing memory takes any gradient");
    issued_ = last(Lane::kEarlyUpdates);
  }
  gradients_.come(block);
}

// What is put together gets its place. Returns what that waits for.
std::uint32_t ScheduleProgram::stage_gradient(std::uint32_t block) {
  if (in_.policies.gradients.blocks[block].bytes == 0) return kNoOp;
  const GradientStaging staged = gradients_.stage(block);
  SPILLWAY_CHECK(!staged.down, "here a gradient comes in one visit, so that it has left when another is staged");
  switch (staged.free) {
    case StagingFree::kCopied: return staging_copied_[staged.staging];
    case StagingFree::kWritten: return staging_written_[staged.staging];
    case StagingFree::kNow: break;
  }
  return kNoOp;
}

void ScheduleProgram::complete_gradient(std::uint32_t b, std::uint32_t computed) {
  const ScheduleBlock& block = in_.blocks[b];
  if (in_.policies.gradients.blocks[b].bytes == 0) {
    if (block.early) complete(b);  // other ranks own all of it
    return;
  }
  const GradientDown down = gradients_.complete(b);
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    const ScheduleTile& tile = in_.tiles[t];
    if (tile.elements == 0) continue;
    if (down.way == DownWay::kSpill) {
      spill_gradient(t, down, computed);
    } else {
      landed_[t] = copy_gradient(t, down, computed);
    }
  }
  if (block.early) complete(b);
}

std::uint32_t ScheduleProgram::copy_gradient(std::uint32_t t, const GradientDown& down, std::uint32_t computed) {
  ScheduleOp op = of_tile(OpKind::kCopyGradient, Lane::kD2h, t, in_.tiles[t].gradient_bytes);
  op.place = down.staging;
  op.buffer = down.passing.value_or(kNothing);
  return staging_copied_[down.staging] = add(op, {computed, down.passing ? passing_freed_[*down.passing] : kNoOp});
}

// As fetch_through_chunks(), the other way.
void ScheduleProgram::spill_gradient(std::uint32_t t, const GradientDown& down, std::uint32_t computed) {
  SPILLWAY_CHECK(in_.spill_chunks > 0 && in_.chunk_bytes > 0, "gradients are spilled through chunks");
  const ScheduleTile& tile = in_.tiles[t];
  const std::uint64_t piece_bytes = std::max(in_.spill_chunks / 2, 1u) * in_.chunk_bytes;
  for (std::uint64_t done = 0; done < tile.spill_bytes; done += piece_bytes) {
    const std::uint64_t bytes = std::min(piece_bytes, tile.spill_bytes - done);
    const std::uint64_t payload = std::min(bytes, tile.gradient_bytes - std::min(done, tile.gradient_bytes));
    const std::uint64_t last_chunk = spill_chunk_ + div_up(bytes, in_.chunk_bytes) - 1;
    ScheduleOp op = of_tile(OpKind::kCopyGradient, Lane::kD2h, t, payload);
    op.place = down.staging;
    op.buffer = static_cast<std::uint32_t>(spill_chunk_ % in_.spill_chunks);
    const std::uint32_t copy = add(op, {computed, spill_freed_[last_chunk % in_.spill_chunks]});
    op.kind = OpKind::kSpillGradient;
    op.lane = Lane::kWrites;
    op.place = kNothing;
    op.bytes = bytes;
    spilled_[t] = staging_written_[down.staging] = add(op, {copy});
    for (; spill_chunk_ <= last_chunk; ++spill_chunk_) spill_freed_[spill_chunk_ % in_.spill_chunks] = spilled_[t];
  }
}

// A step ends when they are where the update reads them. Returns the last of the writes that are still awaited.
std::uint32_t ScheduleProgram::spills_written() {
  std::uint32_t last_write = kNoOp;
  for (std::uint32_t s = 0; s < staging_written_.size(); ++s) {
    if (gradients_.leaving(s) != StagingFree::kWritten) continue;
    if (last_write == kNoOp || staging_written_[s] > last_write) last_write = staging_written_[s];
    gradients_.written(s);
  }
  return last_write;
}

// What the block's gradient lay in is free after it.
void ScheduleProgram::updated_early(std::uint32_t block) {
  gradients_.updated(block);
  if (const auto passing = gradients_.passing(block)) passing_freed_[*passing] = last(Lane::kEarlyUpdates);
}

}  // namespace spillway
