// Which ranks run on the machine that this one runs on.
#pragma once

#include <cstdint>
#include <string>

#include "spillway/communicator.h"

namespace spillway {

struct RankGroup {
  std::uint32_t count = 1, index = 0;  // ranks in it, and how many of them are below this one
};

// Ranks with the same key as this one. Collective.
RankGroup ranks_with(Communicator& ranks, std::uint64_t key);

// Of the running kernel, which is one for all containers of a machine: what names it.
std::string host_id();

// Ranks that share this one's memory, whatever containers they are in. Collective.
RankGroup ranks_on_this_host(Communicator& ranks);

// What take_gpu() sets CUDA_VISIBLE_DEVICES to. `visible`: what it is now; null: not set.
std::string gpu_of(const RankGroup& host, const char* visible);

}  // namespace spillway
