#include "src/engine/early_update.h"

namespace spillway {

void EarlyUpdate::expect(std::span<const std::uint32_t> blocks) {
  if (tiles_.queue().expect(blocks)) tiles_.start_loads();
}

void EarlyUpdate::add(std::uint32_t block, const ParameterUpdates& parameters) {
  tiles_.update_by(parameters);
  tiles_.queue().tell(QueueEvent::kComplete, block);
  tiles_.start_loads();
}

void EarlyUpdate::note_landed(std::uint32_t block) {
  tiles_.queue().tell(gradients_.finite(block) ? QueueEvent::kLanded : QueueEvent::kNotFinite, block);
}

void EarlyUpdate::advance(bool all) {
  UpdateQueue& queue = tiles_.queue();
  while (const auto block = queue.early_block()) {
    if (all) gradients_.wait_landed(*block);
    if (!gradients_.landed(*block)) return;
    note_landed(*block);
    if (!all) tiles_.start_loads();
    if (const auto buffer = queue.reading(); buffer && mover_.read(*buffer)) queue.tell(QueueEvent::kRead, *buffer);
    const auto turn = queue.next_turn(all ? Turns::kEarlyAll : Turns::kEarly);
    if (!turn) return;
    take_turn(*turn);
  }
}

bool EarlyUpdate::make_room() {
  const auto block = tiles_.queue().early_block();
  if (!block) return false;
  gradients_.wait_landed(*block);
  note_landed(*block);
  while (const auto turn = tiles_.queue().next_turn(Turns::kEarlyOf, *block)) take_turn(*turn);
  return true;
}

void EarlyUpdate::take_turn(const TileTurn& turn) {
  tiles_.take_turn(turn, nullptr);
  if (turn.ends_block) gradients_.forget(turn.block);
  tiles_.start_loads();
}

bool EarlyUpdate::keep(bool right) {
  if (!under_way()) return true;
  if (right) advance(true);
  if (right && (!tiles_.queue().stopped() || planned_)) return true;  // a result is for begin() to refuse
  take_back();
  return false;
}

void EarlyUpdate::take_back() {
  tiles_.cancel_read_ahead();
  tiles_.finish_saves();
  if (tiles_.queue().touched()) mover_.forget_written();
  tiles_.reset();
}

}  // namespace spillway
