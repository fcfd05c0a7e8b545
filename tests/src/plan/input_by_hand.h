// An input that is put together by hand, whose policies have yet to be told of its blocks and tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "src/plan/schedule.h"

namespace spillway::testing {

// Which there are, and what is updated, in order.
inline void tell_policies(ScheduleInput& input) {
  UpdateQueueOptions& updates = input.policies.updates;
  updates.blocks.clear(), updates.trainable.clear(), updates.order.clear();
  for (const ScheduleBlock& block : input.blocks) updates.blocks.push_back({block.first_tile, block.tiles});
  std::vector<std::uint8_t>& frozen = input.policies.weights.frozen;
  frozen.assign(input.blocks.size(), 1);
  for (std::uint32_t t = 0; t < input.tiles.size(); ++t) {
    const bool trainable = input.tiles[t].elements > 0;
    updates.trainable.push_back(trainable);
    if (trainable) updates.order.push_back(t), frozen[input.tiles[t].block] = 0;
  }
}

}  // namespace spillway::testing
