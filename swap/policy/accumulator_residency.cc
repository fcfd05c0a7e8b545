#include "swap/policy/accumulator_residency.h"

#include <utility>

#include "spillway/error.h"

namespace spillway {

AccumulatorResidency::AccumulatorResidency(std::vector<std::uint64_t> place_bytes,
                                           std::vector<std::uint64_t> block_bytes) {
  for (const std::uint64_t bytes : place_bytes) places_.push_back({.bytes = bytes, .block = {}});
  for (const std::uint64_t bytes : block_bytes) blocks_.push_back({.bytes = bytes, .place = {}});
}

AccumulatorResidency::Arrival AccumulatorResidency::bring(std::uint32_t b) {
  Block& block = blocks_[b];
  Arrival arrival{.place = block.place ? *block.place : choose(b), .leaves = {}};
  PlaceState& place = places_[arrival.place];
  place.turn = ++turn_;
  if (block.place) return arrival;
  arrival.leaves = leave(arrival.place);
  // Its sums are at home, or on their way there: a later gradient brings them back.
  if (place.block) blocks_[*place.block].place.reset();
  place.block = b;
  block.place = arrival.place;
  // Nothing comes for the first gradient of a step: there is no sum yet.
  arrival.comes = block.at_home;
  return arrival;
}

std::optional<std::uint32_t> AccumulatorResidency::leave(std::uint32_t p) {
  PlaceState& place = places_[p];
  if (!std::exchange(place.added, false)) return std::nullopt;
  blocks_[*place.block].at_home = true;
  return place.block;
}

bool AccumulatorResidency::add(std::uint32_t b) { return std::exchange(places_[*blocks_[b].place].added, true); }

std::uint32_t AccumulatorResidency::complete(std::uint32_t b) {
  SPILLWAY_CHECK(blocks_[b].place, "sums are complete where they were added to");
  const std::uint32_t place = *std::exchange(blocks_[b].place, std::nullopt);
  blocks_[b].at_home = false;
  places_[place].block.reset();
  places_[place].added = false;
  return place;
}

void AccumulatorResidency::begin_step() {
  for (PlaceState& place : places_) {
    place.block.reset();
    place.added = false;
  }
  for (Block& block : blocks_) {
    block.place.reset();
    block.at_home = false;
  }
}

std::uint32_t AccumulatorResidency::choose(std::uint32_t block) const {
  std::optional<std::uint32_t> choice;
  const auto rank = [&](std::uint32_t p) { return std::pair(places_[p].block.has_value(), places_[p].turn); };
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].bytes < blocks_[block].bytes) continue;
    if (!choice || rank(p) < rank(*choice)) choice = p;
  }
  SPILLWAY_CHECK(choice, "each block's sums fit a place");
  return *choice;
}

}  // namespace spillway
