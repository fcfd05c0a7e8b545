#include "src/plan/update_turns.h"

namespace spillway {

void UpdateTurns::make_moves(Moves allowed) {
  while (const auto move = queue_.next_move(allowed)) make(*move);
}

void UpdateTurns::start_loads() {
  for (;;) {
    make_moves(Moves::kAll);
    const auto buffer = queue_.saving();
    if (!buffer || !is_written(*buffer)) return;
    queue_.tell(QueueEvent::kWritten, *buffer);
  }
}

void UpdateTurns::take_turn(const TileTurn& turn, bool delivers) {
  start_loads();  // here, where waiting for a buffer is waiting for its write and not for a read
  work_on(turn, delivers);
  queue_.tell(QueueEvent::kTurnDone);
  start_loads();
}

void UpdateTurns::expect(std::span<const std::uint32_t> blocks) {
  if (queue_.expect(blocks)) start_loads();
}

void UpdateTurns::complete(std::uint32_t block) {
  queue_.tell(QueueEvent::kComplete, block);
  start_loads();
}

bool UpdateTurns::note_landing(std::uint32_t block, bool wait) {
  const auto landed = landing(block, wait);
  if (landed) queue_.tell(*landed, block);
  return landed.has_value();
}

void UpdateTurns::take_early(const TileTurn& turn) {
  take_turn(turn, false);
  if (turn.ends_block) updated_early(turn.block);
}

void UpdateTurns::advance(bool all) {
  while (const auto block = queue_.early_block()) {
    if (!note_landing(*block, all)) return;
    start_loads();
    if (const auto buffer = queue_.reading(); buffer && is_read(*buffer)) queue_.tell(QueueEvent::kRead, *buffer);
    const auto turn = queue_.next_turn(all ? Turns::kEarlyAll : Turns::kEarly);
    if (!turn) return;
    take_early(*turn);
  }
}

bool UpdateTurns::make_room() {
  const auto block = queue_.early_block();
  if (!block) return false;
  note_landing(*block, true);
  while (const auto turn = queue_.next_turn(Turns::kEarlyOf, *block)) take_early(*turn);
  return true;
}

void UpdateTurns::read_ahead() {
  queue_.tell(QueueEvent::kFetched);
  start_loads();
}

void UpdateTurns::begin() {
  queue_.tell(QueueEvent::kBegin);
  make_moves(Moves::kGradients);  // of tiles that were read before
}

void UpdateTurns::begin_check() {
  queue_.tell(QueueEvent::kBeginCheck);
  start_loads();
}

bool UpdateTurns::run_until(std::uint32_t block, bool wanted) {
  const bool delivers = wanted && queue_.delivers(block);
  while (const auto turn = queue_.next_turn(Turns::kUntil, block)) take_turn(*turn, delivers && turn->block == block);
  return delivers;
}

void UpdateTurns::run_rest() {
  while (const auto turn = queue_.next_turn(Turns::kRest)) take_turn(*turn, false);
}

}  // namespace spillway
