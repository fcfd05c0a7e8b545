#include "swap/tile_walk.h"

namespace spillway {

std::exception_ptr write_tiles(TileMover& mover, std::uint32_t tiles, const TileWork& work,
                               const std::function<bool(std::uint32_t tile)>& left_out) {
  std::exception_ptr failure;
  for (std::uint32_t t = 0; t < tiles && !failure; ++t) {
    if (left_out && left_out(t)) continue;
    const std::uint32_t buffer = t % mover.buffers();
    mover.finish_save(buffer);
    const TileMemory memory = mover.blank(t, buffer);
    try {
      work(t, memory);
    } catch (...) {
      failure = std::current_exception();
      mover.drop(buffer);
    }
    if (!failure) mover.start_save(buffer, Save::kNew);
  }
  mover.finish_saves();
  return failure;
}

void read_resident_tiles(TileMover& mover, std::span<const TilePlace> tiles) {
  for (std::uint32_t t = 0; t < tiles.size(); ++t) {
    if (!resident(tiles[t])) continue;
    const std::uint32_t buffer = t % mover.buffers();
    mover.finish_save(buffer);
    // From the slot, whatever the home: nothing is at home yet.
    mover.start_load(t, buffer, Load::kStore);
    mover.finish_load(buffer);
    mover.start_save(buffer, Save::kRestored);
  }
  mover.finish_saves();
}

void write_resident_tiles(TileMover& mover, std::span<const TilePlace> tiles) {
  std::uint32_t used = 0;
  for (std::uint32_t t = 0; t < tiles.size(); ++t) {
    const TilePlace& tile = tiles[t];
    if (!tile.shape.trainable || (written_by_update(tile, Part::kWeights) && written_by_update(tile, Part::kStates)))
      continue;
    const std::uint32_t buffer = used++ % mover.buffers();
    mover.finish_save(buffer);
    mover.start_load(t, buffer);
    mover.finish_load(buffer);
    mover.start_save(buffer, Save::kCommit);
  }
  mover.finish_saves();
}

}  // namespace spillway
