#include "swap/policy/activation_residency.h"

#include <algorithm>

#include "spillway/error.h"

namespace spillway {
namespace {

// So many uses may be fetched ahead where there are places to spare; more would only take places from what is kept.
constexpr std::size_t kMostAhead = 8;

struct UsedPlace {
  std::optional<std::uint32_t> activation;
  std::size_t last_use = 0;
  std::size_t next_use = 0;  // of what it holds; uses.size(): it is not needed any more
  bool home_is_old = false;  // its home does not hold what the place does
};

struct Known {           // of an activation
  bool at_home = false;  // its home holds what is needed next
  std::uint32_t last_use = 0;
};

// For each use, the next one that needs what the activation holds then; uses.size() when there is none.
std::vector<std::size_t> next_needs(std::span<const ActivationUse> uses) {
  std::vector<std::size_t> next(uses.size(), uses.size());
  std::vector<std::size_t> seen;
  for (std::size_t u = uses.size(); u-- > 0;) {
    const std::uint32_t activation = uses[u].activation;
    if (activation >= seen.size()) seen.resize(activation + 1, uses.size());
    next[u] = seen[activation];
    // A write needs nothing of what was there, so what lies in the place before it need not be kept.
    seen[activation] = uses[u].access == Access::kWrite ? uses.size() : u;
  }
  return next;
}

class Assignment {
 public:
  Assignment(std::span<const ActivationUse> uses, std::uint32_t held, std::uint32_t places)
      : uses_(uses), next_(next_needs(uses)), places_(places) {
    SPILLWAY_CHECK(held > 0 && places >= held, "what is held at one time has places");
    std::uint32_t most = 0;
    for (const ActivationUse& use : uses) most = std::max(most, use.activation);
    activations_.resize(most + 1);
    must_spare_ = held - 1;
    // A place that was used just now comes free late: where others can be had it is left alone, so that a fetch
    // overlaps.
    may_spare_ = std::max<std::size_t>(2 * held - 1, std::min<std::size_t>(kMostAhead, places / 2));
  }

  std::vector<UsePlace> run() {
    for (std::size_t u = 0; u < uses_.size(); ++u) plan_.push_back(assign(u));
    return std::move(plan_);
  }

 private:
  UsePlace assign(std::size_t u) {
    const ActivationUse& use = uses_[u];
    UsePlace planned;
    std::size_t p = find(use.activation);
    if (p == places_.size()) {
      p = choose(u, may_spare_);
      if (p == places_.size()) p = choose(u, must_spare_);
      SPILLWAY_CHECK(p < places_.size(), "a place is free");
      UsedPlace& place = places_[p];
      if (place.activation) {
        planned.after = static_cast<std::uint32_t>(place.last_use);
        const bool needed = place.next_use < uses_.size();
        if (needed) {
          // What its home already holds need not be written again.
          plan_[place.last_use].spill = place.home_is_old;
          activations_[*place.activation].at_home = true;
        }
      }
      planned.fetch = use.access != Access::kWrite;
      SPILLWAY_CHECK(!planned.fetch || activations_[use.activation].at_home,
                     "an activation is written before it is read");
      planned.previous = activations_[use.activation].last_use;
      place.activation = use.activation;
      place.home_is_old = false;
    }
    UsedPlace& place = places_[p];
    if (use.access != Access::kRead) {
      place.home_is_old = true;
      activations_[use.activation].at_home = false;
    }
    activations_[use.activation].last_use = static_cast<std::uint32_t>(u);
    planned.place = static_cast<std::uint32_t>(p);
    place.last_use = u;
    place.next_use = next_[u];
    return planned;
  }

  std::size_t find(std::uint32_t activation) const {
    std::size_t p = 0;
    while (p < places_.size() && places_[p].activation != activation) ++p;
    return p;
  }

  // An empty place, else one that is not needed any more and free soonest, else the one whose next use is farthest.
  std::size_t choose(std::size_t use, std::size_t spare) const {
    std::size_t best = places_.size();
    auto better = [&](const UsedPlace& place) {
      if (best == places_.size()) return true;
      const UsedPlace& other = places_[best];
      if (!place.activation || !other.activation) return !place.activation && other.activation;
      return place.next_use != other.next_use ? place.next_use > other.next_use : place.last_use < other.last_use;
    };
    for (std::size_t p = 0; p < places_.size(); ++p) {
      if (places_[p].activation && places_[p].last_use + spare >= use) continue;
      if (better(places_[p])) best = p;
    }
    return best;
  }

  const std::span<const ActivationUse> uses_;
  const std::vector<std::size_t> next_;
  std::vector<UsedPlace> places_;
  std::vector<Known> activations_;
  std::vector<UsePlace> plan_;
  std::size_t must_spare_ = 0, may_spare_ = 0;  // the last uses whose places are not taken
};

}  // namespace

std::vector<UsePlace> assign_activations(std::span<const ActivationUse> uses, std::uint32_t held,
                                         std::uint32_t places) {
  return Assignment(uses, held, places).run();
}

}  // namespace spillway
