// An order of rows for each epoch, which any row's place is computed in by itself, so that a run goes on anywhere.
// Pure.
#pragma once

#include <cstdint>

namespace spillway::models::finetune {

// The place, below `count`, of the row that comes `position`-th when the rows of each epoch, count of them, are drawn
// in an order of its own. Every epoch has each of them once; the order depends on seed, epoch and count alone.
std::uint64_t shuffled_row(std::uint64_t position, std::uint64_t count, std::uint64_t seed);

}  // namespace spillway::models::finetune
