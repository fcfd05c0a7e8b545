#include "swap/policy/residency.h"

#include "spillway/error.h"

namespace spillway {
namespace {

struct Place {
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

// By block: its first visit; visits.size() when there is none.
std::vector<std::size_t> first_uses(std::span<const std::uint32_t> visits, std::size_t blocks) {
  std::vector<std::size_t> first(blocks, visits.size());
  for (std::size_t v = visits.size(); v-- > 0;) first[visits[v]] = v;
  return first;
}

// Its own place, if it has one.
std::size_t own_place(std::span<const Place> places, std::uint32_t block) {
  std::size_t p = 0;
  while (p < places.size() && places[p].owner != block) ++p;
  return p;
}

struct Uses {
  std::vector<std::size_t> first, next;  // by block, by visit

  std::size_t next_of(const Place& place) const {
    return place.last_visit ? next[*place.last_visit] : first[*place.block];
  }
};

std::size_t choose_victim(std::span<const Place> places, std::uint64_t bytes, std::size_t visit, const Uses& uses,
                          bool spare_the_last_visit) {
  std::size_t best = places.size();
  auto better = [&](const Place& place) {
    if (best == places.size()) return true;
    const Place& other = places[best];
    if (!place.block || !other.block) return !place.block && (other.block || place.bytes < other.bytes);
    // Farthest next use; among equals the one used longest ago, which is free soonest.
    const std::size_t next = uses.next_of(place), other_next = uses.next_of(other);
    return next != other_next ? next > other_next : place.last_visit < other.last_visit;
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
  const Uses uses{.first = first_uses(visit_blocks, block_bytes.size()), .next = next_uses(visit_blocks)};
  std::vector<std::uint64_t> visited_bytes = {0};  // before each visit
  for (std::uint32_t block : visit_blocks) visited_bytes.push_back(visited_bytes.back() + block_bytes[block]);
  std::vector<Place> places;
  for (std::size_t p = 0; p < place_bytes.size(); ++p) {
    const auto owner = rules.owners.empty() ? std::nullopt : rules.owners[p];
    const bool filled = !rules.filled.empty() && rules.filled[p] != 0;
    const auto block = !rules.holds.empty() ? rules.holds[p] : filled ? owner : std::nullopt;
    places.push_back({.bytes = place_bytes[p], .owner = owner, .block = block, .last_visit = {}});
  }
  std::vector<VisitPlace> plan;
  for (std::size_t v = 0; v < visit_blocks.size(); ++v) {
    const std::uint64_t bytes = block_bytes[visit_blocks[v]];
    std::size_t place = 0;
    while (place < places.size() && places[place].block != visit_blocks[v]) ++place;
    const bool fetch = place == places.size();
    if (fetch) place = own_place(places, visit_blocks[v]);
    if (place == places.size()) place = choose_victim(places, bytes, v, uses, true);
    if (place == places.size()) place = choose_victim(places, bytes, v, uses, false);
    SPILLWAY_CHECK(place < places.size(), "every block fits a place");
    plan.push_back({.place = static_cast<std::uint32_t>(place), .fetch = fetch, .after = places[place].last_visit});
    places[place].block = visit_blocks[v];
    places[place].last_visit = static_cast<std::uint32_t>(v);
    if (uses.next[v] == visit_blocks.size() || places[place].owner) continue;
    plan[v].leaves = visited_bytes[uses.next[v]] - visited_bytes[v + 1] >= rules.reuse_bytes;
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
