// Every tile of the model shown in order, as it is after the step's update: to an export, or to a snapshot that goes on
// during the next forward pass. Tiles whose update is still to come are shown in its turn; the others are read for it.
// The tour ends with Updater::finish(). One thread at a time. Errors: kIo, kCorrupt.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

#include "src/engine/tile_executor.h"
#include "swap/tile_walk.h"

namespace spillway {

class TileTour {
 public:
  explicit TileTour(TileExecutor& tiles) : tiles_(tiles) {}

  // What `work` throws ends the tour, but not the update.
  void begin(TileWork work);
  // Shows the tiles up to the block's last that have no update, as far as they come next: so the tour keeps pace with a
  // forward pass that updates nothing.
  void show_until(std::uint32_t block);
  // What `work` has thrown: the caller's own failure, a full disk say, and none of the mover's.
  std::exception_ptr end() { return std::exchange(failure_, nullptr); }

 private:
  TileExecutor& tiles_;
  TileWork work_;
  std::exception_ptr failure_;
};

}  // namespace spillway
