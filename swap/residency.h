// Which place in HBM each visit's block uses. Pure: the visit order of a step is known, so the whole step is decided
// before it starts.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace spillway {

struct VisitPlace {
  std::uint32_t place = 0;
  bool fetch = true;    // false: the block is still there from an earlier visit
  bool leaves = false;  // the block gives the place up behind this visit, though it will be wanted again
  // The last visit before this one that uses the place: its release must come before this visit's fetch.
  std::optional<std::uint32_t> after;
};

struct ResidencyRules {
  // Of every place the block that alone may use it, if there is one; empty: every place is anybody's.
  std::span<const std::optional<std::uint32_t>> owners = {};
  // A block leaves a place that is not its own when at least so many bytes are visited before it is wanted again.
  std::uint64_t reuse_bytes = UINT64_MAX;
};

// One entry a visit; blocks need block_bytes[block], place p holds place_bytes[p], and every block fits some place that
// it may use. A place is taken from the block whose next use is farthest (Belady), but, when there is a choice, never
// from the block of the visit just before: its place comes free too late for the fetch to overlap with compute. Of the
// empty places the smallest that fits is taken. Places are empty at the start of a step, since the update changes every
// weight.
std::vector<VisitPlace> assign_places(std::span<const std::uint32_t> visit_blocks,
                                      std::span<const std::uint64_t> block_bytes,
                                      std::span<const std::uint64_t> place_bytes, const ResidencyRules& rules = {});

}  // namespace spillway
