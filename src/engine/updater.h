// The optimizer's part of a step: every trainable tile that was not updated inside backward, one by one (with several
// NUMA nodes, a tile on each at the same time), while the next ones are read and the last ones are written. Which tile,
// when and where is said by UpdateQueue; the work is the TileExecutor's. States that live in HBM are updated in
// begin(), all at once, by DeviceUpdate. One thread at a time. Errors: kIo, kCorrupt, kNonFinite (a result overflowed).
// Read next: tile_executor.h.
#pragma once

#include "src/engine/device_update.h"
#include "src/engine/parameter_updates.h"
#include "src/engine/tile_executor.h"

namespace spillway {

class Updater {
 public:
  // `device`: of a plan that keeps everything in HBM, and else null.
  Updater(TileExecutor& tiles, DeviceUpdate* device) : tiles_(tiles), device_(device) {}

  // Starts reading the first tiles; the next begin() finds them on their way.
  void read_ahead();

  // begin ─► TileExecutor::run_until(block) … ─► finish: the rest of the step's update, as far as it is asked for. What
  // `parameters` take, and the gradients, must stay as they are until it is finished.
  void begin(const ParameterUpdates& parameters);
  // Updates what is left and blocks until everything is where it lives.
  void finish();

  bool overflowed() const noexcept { return tiles_.overflowed() || (device_ && device_->overflowed()); }
  double adam_seconds() const noexcept { return tiles_.adam_seconds() + (device_ ? device_->seconds() : 0); }

 private:
  TileExecutor& tiles_;
  DeviceUpdate* const device_;
};

}  // namespace spillway
