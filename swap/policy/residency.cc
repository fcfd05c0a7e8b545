#include "swap/policy/residency.h"

#include "spillway/error.h"

namespace spillway {
namespace {

struct PlaceState {
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> owner;
  std::optional<std::uint32_t> block;
  std::optional<std::uint32_t> last_visit;
};

// next_use[v]: the next visit after v of the same block; visits.size() when there is none.
std::vector<std::size_t> next_uses(std::span<const std::uint32_t> visits) {
  std::vector<std::size_t> next(visits.size(), visits.size());
  std::vector<std::size_t> seen;
  for (std::size_t v = visits.size(); v-- > 0;) {
    if (visits[v] >= seen.size()) seen.resize(visits[v] + 1, visits.size());
    next[v] = seen[visits[v]];
    seen[visits[v]] = v;
  }
  return next;
}

// Its own place, if it has one.
std::size_t own_place(std::span<const PlaceState> places, std::uint32_t block) {
  std::size_t p = 0;
  while (p < places.size() && places[p].owner != block) ++p;
  return p;
}

std::size_t choose_victim(std::span<const PlaceState> places, std::uint64_t bytes, std::size_t visit,
                          std::span<const std::size_t> next_use, bool spare_the_last_visit) {
  std::size_t best = places.size();
  auto better = [&](const PlaceState& place) {
    if (best == places.size()) return true;
    const PlaceState& other = places[best];
    if (!place.block || !other.block) return !place.block && (other.block || place.bytes < other.bytes);
    // Farthest next use; among equals the one used longest ago, which is free soonest.
    const std::size_t next = next_use[*place.last_visit], other_next = next_use[*other.last_visit];
    return next != other_next ? next > other_next : *place.last_visit < *other.last_visit;
  };
  for (std::size_t p = 0; p < places.size(); ++p) {
    if (places[p].bytes < bytes || places[p].owner) continue;
    if (spare_the_last_visit && places[p].last_visit && *places[p].last_visit + 1 == visit) continue;
    if (better(places[p])) best = p;
  }
  return best;
}

}  // namespace

std::vector<VisitPlace> assign_places(std::span<const std::uint32_t> visit_blocks,
                                      std::span<const std::uint64_t> block_bytes,
                                      std::span<const std::uint64_t> place_bytes, const ResidencyRules& rules) {
  // Belady's rule needs the next use of each block: known, since the visits are.
  const auto next_use = next_uses(visit_blocks);
  std::vector<std::uint64_t> visited_bytes = {0};  // before each visit
  for (std::uint32_t block : visit_blocks) visited_bytes.push_back(visited_bytes.back() + block_bytes[block]);
  std::vector<PlaceState> places;
  for (std::size_t p = 0; p < place_bytes.size(); ++p) {
    const auto owner = rules.owners.empty() ? std::nullopt : rules.owners[p];
    const bool filled = !rules.filled.empty() && rules.filled[p] != 0;
    places.push_back(
        {.bytes = place_bytes[p], .owner = owner, .block = filled ? owner : std::nullopt, .last_visit = {}});
  }
  std::vector<VisitPlace> plan;
  for (std::size_t v = 0; v < visit_blocks.size(); ++v) {
    const std::uint64_t bytes = block_bytes[visit_blocks[v]];
    std::size_t place = 0;
    while (place < places.size() && places[place].block != visit_blocks[v]) ++place;
    const bool fetch = place == places.size();
    if (fetch) place = own_place(places, visit_blocks[v]);
    // First without the place of the visit just before: a fetch to it could not overlap with that visit's compute.
    if (place == places.size()) place = choose_victim(places, bytes, v, next_use, true);
    if (place == places.size()) place = choose_victim(places, bytes, v, next_use, false);
    SPILLWAY_CHECK(place < places.size(), "every block fits a place");
    plan.push_back({.place = static_cast<std::uint32_t>(place), .fetch = fetch, .after = places[place].last_visit});
    places[place].block = visit_blocks[v];
    places[place].last_visit = static_cast<std::uint32_t>(v);
    if (next_use[v] == visit_blocks.size() || places[place].owner) continue;
    // So much is visited before the block comes again that another use of the place is worth more.
    plan[v].leaves = visited_bytes[next_use[v]] - visited_bytes[v + 1] >= rules.reuse_bytes;
    if (plan[v].leaves) places[place].block.reset();
  }
  return plan;
}

std::vector<std::uint8_t> places_that_stay(std::span<const std::optional<std::uint32_t>> owners,
                                           std::span<const std::uint8_t> frozen) {
  std::vector<std::uint8_t> stay;
  for (const auto& owner : owners) stay.push_back(owner && frozen[*owner] != 0);
  return stay;
}

}  // namespace spillway
