#include "src/engine/updater.h"

namespace spillway {

void Updater::read_ahead() {
  if (!device_) tiles_.read_ahead();
}

void Updater::begin(const ParameterUpdates& parameters) {
  if (device_) return device_->run(parameters);
  // An early update has met a result that is not finite: that could not be refused before the step's gradients were
  // known.
  if (const auto tile = tiles_.queue().overflow()) tiles_.refuse_overflow(*tile);
  tiles_.update_by(parameters);
  // Nothing is updated here yet: a block is when acquire() asks for it (TileExecutor::run_until()), the rest in
  // finish().
  tiles_.begin();
}

void Updater::finish() {
  tiles_.run_rest();
  tiles_.reset();
}

}  // namespace spillway
