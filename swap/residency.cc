#include "swap/residency.h"

#include "spillway/error.h"

namespace spillway {
namespace {

struct Place {
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

std::size_t choose_victim(std::span<const Place> places, std::size_t visit, std::span<const std::size_t> next_use) {
  std::size_t best = places.size();
  std::size_t best_next = 0;
  for (std::size_t p = 0; p < places.size(); ++p) {
    if (!places[p].block) return p;
    const std::uint32_t last = *places[p].last_visit;
    if (places.size() > 1 && last + 1 == visit) continue;
    // Farthest next use; among equals the one used longest ago, which is free soonest.
    if (best == places.size() || next_use[last] > best_next ||
        (next_use[last] == best_next && last < *places[best].last_visit)) {
      best = p;
      best_next = next_use[last];
    }
  }
  return best;
}

}  // namespace

std::vector<VisitPlace> assign_places(std::span<const std::uint32_t> visit_blocks, std::uint32_t places) {
  SPILLWAY_CHECK(places > 0, "there is at least one place");
  const auto next_use = next_uses(visit_blocks);
  std::vector<Place> state(places);
  std::vector<VisitPlace> plan;
  for (std::size_t v = 0; v < visit_blocks.size(); ++v) {
    std::size_t place = 0;
    while (place < state.size() && state[place].block != visit_blocks[v]) ++place;
    const bool fetch = place == state.size();
    if (fetch) place = choose_victim(state, v, next_use);
    plan.push_back({.place = static_cast<std::uint32_t>(place), .fetch = fetch, .after = state[place].last_visit});
    state[place] = {visit_blocks[v], static_cast<std::uint32_t>(v)};
  }
  return plan;
}

}  // namespace spillway
