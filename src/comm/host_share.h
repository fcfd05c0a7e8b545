// Which ranks run on the machine that this one runs on.
#pragma once

#include <cstdint>

#include "spillway/communicator.h"

namespace spillway {

struct RankGroup {
  std::uint32_t count = 1, index = 0;  // ranks in it, and how many of them are below this one
};

// Ranks with the same key as this one. Collective.
RankGroup ranks_with(Communicator& ranks, std::uint64_t key);

// Ranks that share this one's memory, whatever containers they are in. Collective.
RankGroup ranks_on_this_host(Communicator& ranks);

}  // namespace spillway
