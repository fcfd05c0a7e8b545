// Which place in HBM each visit's block uses. Pure: the visit order of a step is known, so the whole step is decided
// before it starts. WeightResidency (weight_residency.h) follows this plan, and departs from it where the caller does.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace spillway {

struct VisitPlace {
  std::uint32_t place = 0;
  bool fetch = true;    // false: the block is still there from an earlier visit
  bool leaves = false;  // the block gives the place up after this visit, though it will be wanted again
  // The last visit before this one that uses the place: its release must come before this visit's fetch.
  std::optional<std::uint32_t> after;
};

struct ResidencyRules {
  // Of every place the block that alone may use it, if there is one; empty: every place is anybody's.
  std::span<const std::optional<std::uint32_t>> owners = {};
  // A block leaves a place that is not its own when at least so many bytes are visited before it is wanted again.
  std::uint64_t reuse_bytes = UINT64_MAX;
  // Of every place: its owner is there already, from the step before. Empty: no place has anything.
  std::span<const std::uint8_t> filled = {};
};

// One entry a visit; blocks need block_bytes[block], place p holds place_bytes[p], and every block fits some place that
// it may use. A place is taken from the block whose next use is farthest (Belady), but, when there is a choice, never
// from the block of the visit just before: its place comes free too late for the fetch to overlap with compute. Of the
// empty places the smallest that fits is taken. Places are empty at the start of a step, since the update changes
// weights, but for those of blocks that no update changes: what owns a place and is frozen is fetched once. So what
// stays over steps is a fixed set, and what does not fit is fetched once a pass: the order of visits is a cycle, in
// which recency would keep nothing at all.
std::vector<VisitPlace> assign_places(std::span<const std::uint32_t> visit_blocks,
                                      std::span<const std::uint64_t> block_bytes,
                                      std::span<const std::uint64_t> place_bytes, const ResidencyRules& rules = {});

// ResidencyRules::filled of every step but the first: the owner, if there is one, is frozen (index: block).
std::vector<std::uint8_t> places_that_stay(std::span<const std::optional<std::uint32_t>> owners,
                                           std::span<const std::uint8_t> frozen);

}  // namespace spillway
