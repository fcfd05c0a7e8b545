// What the ranks of `spillway finetune` share out among them.
#pragma once

#include <cstdint>

#include "spillway/config.h"
#include "tools/terminal/ranks.h"

namespace spillway::models::finetune {

using terminal::path_of_rank;
using terminal::Ranks;
using terminal::Subject;

// Of a step's rows the first one that a rank takes: those of the ranks lie one after the other, in their order.
constexpr std::uint64_t first_row_of_rank(std::uint64_t rows_of_each, std::uint32_t rank) {
  return rows_of_each * rank;
}

// One device for all ranks, before anything else asks for a GPU: theirs, joined, where all have one. `auto` is the
// host's where one of them has none. Collective.
void agree_on_device(Config& config, Ranks& ranks);

}  // namespace spillway::models::finetune
