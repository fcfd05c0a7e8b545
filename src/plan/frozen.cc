// Which frozen blocks stay in HBM. The order of visits is a cycle, so that a fixed set is kept, and the rest takes
// turns in a few places (Belady; recency would keep nothing that comes back once a pass).
#include <algorithm>
#include <functional>
#include <optional>

#include "src/plan/layout.h"

namespace spillway {
namespace {

std::uint64_t block_bytes(const Plan& plan, std::uint32_t block) {
  return plan.blocks[block].partition.elements * size_of(plan.tile_places[0].shape.type);
}

// The most bytes that are visited between two visits of a block, for every block; the step begins again after its end.
std::vector<std::uint64_t> longest_waits(const Plan& plan) {
  std::vector<std::uint64_t> last(plan.blocks.size(), UINT64_MAX), waits(plan.blocks.size(), 0);
  std::uint64_t visited = 0;
  for (int round = 0; round < 2; ++round) {
    for (const Visit& visit : plan.visits) {
      if (last[visit.block] != UINT64_MAX) {
        waits[visit.block] = std::max(waits[visit.block], visited - last[visit.block]);
      }
      visited += block_bytes(plan, visit.block);
      last[visit.block] = visited;
    }
  }
  return waits;
}

// `count` of them, evenly: a fetch of another then has the time of those between.
std::vector<std::uint32_t> spread(const std::vector<std::uint32_t>& blocks, std::size_t count) {
  std::vector<std::uint32_t> some;
  for (std::size_t i = 0; i < count; ++i) some.push_back(blocks[i * blocks.size() / count]);
  return some;
}

class Room {
 public:
  Room(const Plan& plan, WeightsRoom room)
      : plan_(plan),
        room_(room.bytes),
        // With nothing but frozen blocks to take turns a place less is a block more that stays.
        shared_(anything_trained(plan) ? room.shared : std::min<std::size_t>(room.shared, kLeastPlaces)) {}

  std::uint64_t place_bytes(std::uint32_t block) const { return align_up(block_bytes(plan_, block), kPage); }

  // Of places for `kept`, rising, and of those in which all others take turns.
  std::uint64_t needed(const std::vector<std::uint32_t>& kept) const {
    std::uint64_t bytes = 0;
    std::vector<std::uint64_t> others;
    for (std::uint32_t b = 0; b < plan_.blocks.size(); ++b) {
      if (std::ranges::binary_search(kept, b)) {
        bytes += place_bytes(b);
      } else if (std::ranges::find(plan_.hbm.owners, std::optional(b)) == plan_.hbm.owners.end()) {
        others.push_back(place_bytes(b));
      }
    }
    const std::size_t shared = std::min(shared_, others.size());
    std::ranges::partial_sort(others,
                              others.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(2, others.size())),
                              std::greater<>());
    if (shared > 0) bytes += others[0];
    if (shared > 1) bytes += (shared - 1) * others[1];
    return bytes;
  }
  bool fits(const std::vector<std::uint32_t>& kept) const { return needed(kept) <= room_; }

 private:
  const Plan& plan_;
  const std::uint64_t room_;
  const std::size_t shared_;
};

}  // namespace

bool anything_trained(const Plan& plan) {
  return std::ranges::any_of(plan.blocks, [](const BlockPlan& b) { return b.partition.trainable_elements > 0; });
}

// max_reuse_distance speaks of the way to the next step, too.
std::vector<std::uint32_t> blocks_that_may_stay(const Plan& plan) {
  const auto frozen = frozen_blocks(plan);
  const auto waits = longest_waits(plan);
  std::vector<bool> visited(plan.blocks.size());
  for (const Visit& visit : plan.visits) visited[visit.block] = true;
  std::vector<std::uint32_t> blocks;
  for (std::uint32_t b = 0; b < plan.blocks.size(); ++b) {
    if (visited[b] && frozen[b] != 0 && waits[b] < plan.hbm.reuse_bytes) blocks.push_back(b);
  }
  return blocks;
}

std::vector<std::uint32_t> choose_kept(const Plan& plan, WeightsRoom weights) {
  std::vector<std::uint32_t> blocks = blocks_that_may_stay(plan);
  std::erase_if(blocks, [&plan](std::uint32_t b) {
    return std::ranges::find(plan.hbm.owners, std::optional(b)) != plan.hbm.owners.end();
  });
  const Room room(plan, weights);
  if (room.fits(blocks)) return blocks;
  // As many as fit when they are spread; more and larger ones do not, but for odd sizes.
  std::size_t few = 0, many = blocks.size();
  while (many - few > 1) {
    const std::size_t count = few + (many - few) / 2;
    (room.fits(spread(blocks, count)) ? few : many) = count;
  }
  std::vector<std::uint32_t> kept = spread(blocks, few);
  std::uint64_t needed = room.needed(kept);
  for (const std::uint32_t block : blocks) {
    const auto at = std::ranges::lower_bound(kept, block);
    if ((at != kept.end() && *at == block) || needed + room.place_bytes(block) > weights.bytes) continue;
    needed += room.place_bytes(block);
    kept.insert(at, block);
  }
  return kept;
}

void own_where_alone(Plan& plan) {
  const std::vector<std::uint32_t> may_stay = blocks_that_may_stay(plan);
  const std::vector<VisitPlace> planned = planned_visits(plan, plan.hbm);
  std::vector<std::optional<std::uint32_t>> users(plan.hbm.places.size());
  std::vector<bool> several(users.size());
  for (std::size_t v = 0; v < planned.size(); ++v) {
    const std::uint32_t block = plan.visits[v].block, place = planned[v].place;
    if (users[place].value_or(block) != block) several[place] = true;
    users[place] = block;
  }
  for (std::size_t p = 0; p < users.size(); ++p) {
    if (users[p] && !several[p] && std::ranges::binary_search(may_stay, *users[p])) plan.hbm.owners[p] = users[p];
  }
}

std::vector<std::uint8_t> blocks_that_stay(const Plan& plan) {
  std::vector<std::uint8_t> stay(plan.blocks.size());
  const auto frozen = frozen_blocks(plan);
  for (const auto& owner : plan.hbm.owners) {
    if (owner) stay[*owner] = frozen[*owner];
  }
  return stay;
}

std::uint64_t fetched_bytes(const Plan& plan) {
  const std::vector<VisitPlace> planned = planned_visits(plan, plan.hbm);
  std::uint64_t bytes = 0;
  for (std::size_t v = 0; v < planned.size(); ++v)
    bytes += planned[v].fetch ? block_bytes(plan, plan.visits[v].block) : 0;
  return bytes;
}

}  // namespace spillway
