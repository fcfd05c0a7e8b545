#include "swap/policy/pass_places.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace spillway {
namespace {

// Of blocks that are visited over and over, in the order in which a place of their own is worth most. Each once.
std::vector<std::uint32_t> by_worth(std::span<const std::uint32_t> visit_blocks,
                                    std::span<const std::uint64_t> block_bytes, std::size_t places) {
  std::vector<std::uint32_t> visits(block_bytes.size()), blocks, order;
  for (std::uint32_t block : visit_blocks) {
    if (visits[block]++ == 0) blocks.push_back(block);
  }
  for (std::uint32_t block : blocks) {
    if (visits[block] > 1) order.push_back(block);
  }
  // Evenly over the pass, so that between two blocks that must be fetched others compute.
  const std::size_t spread = std::min(places, blocks.size());
  for (std::size_t i = 0; i < spread; ++i) order.push_back(blocks[i * blocks.size() / spread]);
  std::ranges::stable_sort(blocks, std::greater<>(), [&](std::uint32_t block) { return block_bytes[block]; });
  order.insert(order.end(), blocks.begin(), blocks.end());
  std::vector<std::uint32_t> once;
  for (std::uint32_t block : order) {
    if (std::exchange(visits[block], 0) > 0) once.push_back(block);
  }
  return once;
}

// Places and blocks that have no owner and no place of their own, by size.
struct TakingTurns {
  std::vector<std::uint64_t> places, blocks;  // bytes, rising

  // The largest have two places for them, so that one is fetched while another is used.
  bool possible() const {
    const std::size_t needed = std::min<std::size_t>(2, blocks.size());
    if (places.size() < needed) return false;
    for (std::size_t i = 1; i <= needed; ++i) {
      if (places[places.size() - i] < blocks[blocks.size() - i]) return false;
    }
    return true;
  }
  TakingTurns without(std::uint64_t place, std::uint64_t block) const {
    TakingTurns less = *this;
    less.places.erase(std::ranges::lower_bound(less.places, place));
    less.blocks.erase(std::ranges::lower_bound(less.blocks, block));
    return less;
  }
};

}  // namespace

std::vector<std::optional<std::uint32_t>> owners_in_passes(std::span<const std::uint32_t> visit_blocks,
                                                           std::span<const std::uint64_t> block_bytes,
                                                           std::span<const std::uint64_t> place_bytes,
                                                           const ResidencyRules& rules) {
  std::vector<std::optional<std::uint32_t>> owners(rules.owners.begin(), rules.owners.end());
  owners.resize(place_bytes.size());
  std::vector<std::uint32_t> blocks = by_worth(visit_blocks, block_bytes, place_bytes.size());
  std::erase_if(blocks, [&](std::uint32_t b) { return std::ranges::find(owners, std::optional(b)) != owners.end(); });
  TakingTurns turns;
  std::uint64_t pass_bytes = 0;
  for (std::uint32_t block : visit_blocks) pass_bytes += block_bytes[block];
  for (std::uint32_t block : blocks) turns.blocks.push_back(block_bytes[block]);
  for (std::size_t p = 0; p < owners.size(); ++p) {
    if (!owners[p]) turns.places.push_back(place_bytes[p]);
  }
  std::ranges::sort(turns.blocks);
  std::ranges::sort(turns.places);
  for (std::uint32_t block : blocks) {
    const auto place = std::ranges::lower_bound(turns.places, block_bytes[block]);
    if (place == turns.places.end() || pass_bytes - block_bytes[block] >= rules.reuse_bytes) continue;
    TakingTurns others = turns.without(*place, block_bytes[block]);
    if (!others.possible()) continue;
    std::size_t p = 0;
    while (owners[p] || place_bytes[p] != *place) ++p;
    owners[p] = block;
    turns = std::move(others);
  }
  return owners;
}

}  // namespace spillway
