#include "src/engine/tile_tour.h"

namespace spillway {

void TileTour::begin(TileWork work) {
  work_ = std::move(work);
  tiles_.show_to([this](std::uint32_t tile, const TileMemory& memory) {
    try {
      work_(tile, memory);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return failure_ == nullptr;
  });
}

void TileTour::show_until(std::uint32_t block) {
  while (const auto turn = tiles_.queue().next_turn(Turns::kShown, block)) tiles_.take_turn(*turn, nullptr);
}

}  // namespace spillway
