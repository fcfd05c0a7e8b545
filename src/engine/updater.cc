#include "src/engine/updater.h"

namespace spillway {

void Updater::read_ahead() {
  if (device_) return;
  tiles_.queue().tell(QueueEvent::kFetched);
  tiles_.start_loads();
}

void Updater::begin(const ParameterUpdates& parameters) {
  if (device_) return device_->run(parameters);
  if (const auto tile = tiles_.queue().overflow()) tiles_.refuse_overflow(*tile);
  tiles_.update_by(parameters);
  tiles_.queue().tell(QueueEvent::kBegin);
  tiles_.start_gradients();
}

void Updater::begin_check() {
  tiles_.queue().tell(QueueEvent::kBeginCheck);
  tiles_.start_loads();
}

bool Updater::run_until(std::uint32_t block, std::byte* to) {
  UpdateQueue& queue = tiles_.queue();
  const bool delivers = to != nullptr && queue.delivers(block);
  while (const auto turn = queue.next_turn(Turns::kUntil, block)) {
    tiles_.take_turn(*turn, delivers && turn->block == block ? to : nullptr);
  }
  if (queue.under_way()) tiles_.start_loads();
  return delivers;
}

void Updater::finish() {
  while (const auto turn = tiles_.queue().next_turn(Turns::kRest)) tiles_.take_turn(*turn, nullptr);
  tiles_.reset();
}

}  // namespace spillway
