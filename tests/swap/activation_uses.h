// Sequences of uses of activations: as a transformer makes them, and random ones.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "spillway/model.h"
#include "swap/policy/activation_residency.h"

namespace spillway::testing {

// Activation (l, b) is the input of layer l for micro-batch b; the last one becomes the gradient that flows backward.
inline std::vector<ActivationUse> transformer_uses(std::uint32_t layers, std::uint32_t micro_batches) {
  std::vector<ActivationUse> uses;
  std::uint32_t visit = 0;  // an embedding, the layers, the head, the layers again and the embedding
  const auto use = [&](std::uint32_t layer, std::uint32_t b, Access access) {
    uses.push_back({layer * micro_batches + b, access, visit});
  };
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(0, b, Access::kWrite);
  for (std::uint32_t l = 0; l < layers; ++l) {
    ++visit;
    for (std::uint32_t b = 0; b < micro_batches; ++b) {
      use(l, b, Access::kRead);
      use(l + 1, b, Access::kWrite);
    }
  }
  ++visit;
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(layers, b, Access::kUpdate);
  for (std::uint32_t l = layers; l-- > 0;) {
    ++visit;
    for (std::uint32_t b = 0; b < micro_batches; ++b) {
      use(l, b, Access::kRead);
      use(layers, b, Access::kUpdate);
    }
  }
  ++visit;
  for (std::uint32_t b = 0; b < micro_batches; ++b) use(layers, b, Access::kRead);
  return uses;
}

inline std::vector<ActivationUse> random_uses(std::mt19937_64& random, std::uint32_t activations) {
  std::vector<ActivationUse> uses;
  std::vector<bool> written(activations, false);
  for (std::uint64_t count = 1 + random() % 60; count > 0; --count) {
    const auto activation = static_cast<std::uint32_t>(random() % activations);
    const auto access = written[activation] ? static_cast<Access>(random() % 3) : Access::kWrite;
    written[activation] = true;
    uses.push_back({activation, access});
  }
  return uses;
}

// A plan that takes any place it may take: right, and as wasteful as it happens to be.
inline std::vector<UsePlace> random_plan(std::mt19937_64& random, std::span<const ActivationUse> uses,
                                         std::uint32_t held, std::uint32_t places) {
  struct PlaceState {
    std::optional<std::uint32_t> activation, last_use;
    bool home_is_old = false;
  };
  std::vector<PlaceState> hbm(places);
  std::vector<UsePlace> plan;
  std::map<std::uint32_t, std::uint32_t> last;  // use of each activation
  const auto needed = [&](std::uint32_t activation, std::uint32_t after) {
    while (after < uses.size() && uses[after].activation != activation) ++after;
    return after < uses.size() && uses[after].access != Access::kWrite;
  };
  for (std::uint32_t u = 0; u < uses.size(); ++u) {
    UsePlace planned;
    for (planned.place = 0; planned.place < places; ++planned.place) {
      if (hbm[planned.place].activation == uses[u].activation) break;
    }
    if (planned.place == places) {
      do {
        planned.place = static_cast<std::uint32_t>(random() % places);
      } while (hbm[planned.place].last_use && *hbm[planned.place].last_use + held > u);
      PlaceState& place = hbm[planned.place];
      planned.after = place.last_use;
      planned.fetch = uses[u].access != Access::kWrite;
      planned.previous = last[uses[u].activation];
      if (place.home_is_old && needed(*place.activation, u)) plan[*place.last_use].spill = true;
      place = {.activation = uses[u].activation, .last_use = {}, .home_is_old = false};
    }
    hbm[planned.place].last_use = last[uses[u].activation] = u;
    hbm[planned.place].home_is_old |= uses[u].access != Access::kRead;
    plan.push_back(planned);
  }
  return plan;
}

}  // namespace spillway::testing
