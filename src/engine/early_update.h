// The update of blocks inside backward, as their gradients complete: planned, or on a guess (clip_guess.h) that is
// taken back when it was wrong. Nothing of it is seen before the step: whoever fetches a block gets the weights of the
// step before. From the first gradient that is not finite on, nothing more is updated, nor after a result that is not
// finite: Updater::begin() refuses that one.
//
//   add(block) … ─► keep, or take_back
//
// What an early update overwrites is the other slot of its tiles, so taking it back is forgetting that slot. One thread
// at a time. Errors: kIo, kCorrupt.
#pragma once

#include <cstdint>

#include "src/engine/parameter_updates.h"
#include "src/engine/tile_executor.h"
#include "swap/tile_mover.h"

namespace spillway {

class EarlyUpdate {
 public:
  // `planned`: blocks are updated so in every step.
  EarlyUpdate(TileExecutor& tiles, TileMover& mover, bool planned) : tiles_(tiles), mover_(mover), planned_(planned) {}

  // The block's gradient is complete. `parameters` must stay as they are for it until it is updated.
  void add(std::uint32_t block, const ParameterUpdates& parameters);
  // All of it, when the guess was right. False: it was not, or a result is not finite, and it is taken back.
  bool keep(bool right);
  void take_back();
  bool under_way() const { return tiles_.queue().early_under_way(); }

 private:
  TileExecutor& tiles_;
  TileMover& mover_;
  const bool planned_;
};

}  // namespace spillway
