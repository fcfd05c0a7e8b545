#include "src/engine/updater.h"

namespace spillway {

void Updater::read_ahead() {
  if (!device_) tiles_.read_ahead();
}

void Updater::begin(const ParameterUpdates& parameters) {
  if (device_) return device_->run(parameters);
  if (const auto tile = tiles_.queue().overflow()) tiles_.refuse_overflow(*tile);
  tiles_.update_by(parameters);
  tiles_.begin();
}

void Updater::finish() {
  tiles_.run_rest();
  tiles_.reset();
}

}  // namespace spillway
