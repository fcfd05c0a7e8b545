// With several ranks: which places in HBM hold the whole of their block. A rank fetches or updates its own part, and
// the parts of the others are gathered at the first lease after that. It is told what WeightResidency answers, by the
// engine and by the schedule. Pure. All ranks lease the same blocks in the same order, so they gather in one order,
// too.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "swap/policy/weight_residency.h"

namespace spillway {

class GatheredPlaces {
 public:
  explicit GatheredPlaces(std::size_t places) : whole_(places) {}

  // What is trained is another rank's business as well: all ranks give it up together, whether they own of it or not.
  // Before kBegin; `frozen` by block.
  void begin_step(const WeightResidency& weights, std::span<const std::uint8_t> frozen) {
    for (std::uint32_t p = 0; p < whole_.size(); ++p) whole_[p] &= weights.holds(p) && frozen[weights.block(p)] != 0;
  }
  // This is about to be done.
  void act(const WeightAction& action) {
    switch (action.kind) {
      case WeightAction::kUpdate:
      case WeightAction::kUpdateAtHome:
      case WeightAction::kFetch: whole_[action.place] = 0; break;
      default: break;
    }
  }
  // The place is lent. True: the rest of its block must be gathered now.
  bool lend(std::uint32_t place) { return !std::exchange(whole_[place], 1); }
  void forget() { whole_.assign(whole_.size(), 0); }

 private:
  std::vector<std::uint8_t> whole_;
};

}  // namespace spillway
