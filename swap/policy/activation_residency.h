// Which place in HBM each use of an activation gets, and what moves. Pure: the uses of a step are known, so the whole
// step is decided before it starts. Activations do not outlive their step: every place is empty when it begins.
// ActivationPlaces (activation_places.h) moves the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/model.h"

namespace spillway {

struct UsePlace {
  std::uint32_t place = 0;
  bool fetch = false;  // it comes from its home; else it is there already, or the use writes all of it
  bool spill = false;  // after this use it leaves for its home, which does not hold what is needed later
  // When it comes to the place: the last use of the place before, whose release comes first.
  std::optional<std::uint32_t> after;
  std::uint32_t previous = 0;  // when it is fetched: the activation's use before
};

// One entry a use. Every activation fits every place, `held` is the most uses that overlap, and there are at least so
// many places. An activation that is read before it is written in the step is a programmer error.
//
// A place is taken from what is not needed any more, else from the activation whose next use is farthest (Belady), but,
// when there is a choice, never from one of the uses just before: its place comes free too late for a fetch to overlap
// with compute. What leaves goes down once for every time it was written, and only when it is needed again.
std::vector<UsePlace> assign_activations(std::span<const ActivationUse> uses, std::uint32_t held, std::uint32_t places);

}  // namespace spillway
