// The optimizer's part of a step: every trainable tile that was not updated inside backward, one by one (with several
// NUMA nodes, a tile on each at the same time), the next ones being read and the last ones being written meanwhile.
// Which, when and where says UpdateQueue. What lives in HBM is updated in begin() as a whole. One thread at a time.
// Errors: kIo, kCorrupt, kNonFinite (a result overflowed).
#pragma once

#include <cstddef>
#include <cstdint>

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

  // begin ─► run_until(block) … ─► finish: the rest of the step's update, as far as it is asked for. What `parameters`
  // take, and the gradients, must stay as they are until it is finished.
  void begin(const ParameterUpdates& parameters);
  // The same at a resume, for the update that the last commit is the result of: the tiles that nobody has read are read
  // as for an update, verified and handed on as if they were its results. Nothing of them is written.
  void begin_check();
  // Updates the block's tiles and those before them in order. `to`, unless null, is the device address of the block's
  // place: its weights are copied there on the h2d stream, tile by tile. False: they were not, or not all.
  bool run_until(std::uint32_t block, std::byte* to);
  // Updates what is left and blocks until everything is where it lives.
  void finish();

  bool overflowed() const noexcept { return tiles_.overflowed() || (device_ && device_->overflowed()); }
  double adam_seconds() const noexcept { return tiles_.adam_seconds() + (device_ ? device_->seconds() : 0); }

 private:
  TileExecutor& tiles_;
  DeviceUpdate* const device_;
};

}  // namespace spillway
