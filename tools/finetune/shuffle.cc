#include "tools/finetune/shuffle.h"

#include <bit>

#include "tools/models/splitmix.h"

namespace spillway::models::finetune {
// A Feistel network over the smallest square of a power of two that holds all rows is a permutation of it; what falls
// outside of the rows goes through it again (Black, Rogaway 2002).
std::uint64_t shuffled_row(std::uint64_t position, std::uint64_t count, std::uint64_t seed) {
  constexpr int kRounds = 6;
  const std::uint64_t key = mix(seed) ^ mix(~(position / count));
  const int half = (std::bit_width(count - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  std::uint64_t row = position % count;
  do {
    std::uint64_t left = row >> half, right = row & mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mix(key ^ mix(right + (static_cast<std::uint64_t>(round) << 40))) & mask);
      left = right;
      right = next;
    }
    row = left << half | right;
  } while (row >= count);
  return row;
}

}  // namespace spillway::models::finetune
