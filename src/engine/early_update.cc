#include "src/engine/early_update.h"

namespace spillway {

void EarlyUpdate::add(std::uint32_t block, const ParameterUpdates& parameters) {
  tiles_.update_by(parameters);
  tiles_.complete(block);
}

bool EarlyUpdate::keep(bool right) {
  if (!under_way()) return true;
  // What is still to do is done now, for the update that follows counts these tiles as made.
  if (right) tiles_.advance(true);
  if (right && (!tiles_.queue().stopped() || planned_)) return true;  // a result is for begin() to refuse
  take_back();
  return false;
}

void EarlyUpdate::take_back() {
  tiles_.cancel_read_ahead();
  // Writes end first: a slot that is forgotten may be written again at once.
  mover_.finish_saves();
  if (tiles_.queue().touched()) mover_.forget_written();
  tiles_.reset();
}

}  // namespace spillway
