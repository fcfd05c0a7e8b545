// Which blocks stay in HBM while forward passes follow one another without an update. Pure. Within a step: residency.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "swap/policy/residency.h"

namespace spillway {

// Of every place the block that alone may use it while forward passes follow one another and nothing is updated between
// them, as tokens of a text and the batches of an evaluation do: rules.owners, and what else can stay. A fixed set
// does, and the others take turns in two places, or in none where all fit. Blocks that a pass visits twice come first,
// then others, evenly, so that a fetch has the time of those between; the largest of what is left.
std::vector<std::optional<std::uint32_t>> owners_in_passes(std::span<const std::uint32_t> visit_blocks,
                                                           std::span<const std::uint64_t> block_bytes,
                                                           std::span<const std::uint64_t> place_bytes,
                                                           const ResidencyRules& rules = {});

}  // namespace spillway
