// A model whose places in HBM differ in size, for tests of the plan.
#pragma once

#include <iterator>
#include <string>

#include "src/plan/plan.h"

namespace spillway::testing {

// Visits of a step that fetch their block.
inline std::uint64_t fetches(const Plan& plan) {
  const PlannedHits hits = planned_hits(plan);
  return hits.visits - hits.hits;
}

// An embedding, larger than six layers of three sizes, as a tied one is visited.
inline ModelDescription uneven_model() {
  ModelDescription model;
  constexpr std::uint64_t kWidths[] = {90, 40, 70, 40, 70, 20, 40};
  for (std::uint32_t b = 0; b < std::size(kWidths); ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back({name, {{.name = name + ".weight", .shape = {kWidths[b], 1024}}}});
  }
  const auto last = static_cast<std::uint32_t>(model.blocks.size()) - 1;
  for (std::uint32_t b = 0; b <= last; ++b) model.visits.push_back({b, Pass::kForward});
  model.visits.push_back({0, Pass::kBackward});
  for (std::uint32_t b = last; b > 0; --b) model.visits.push_back({b, Pass::kBackward});
  model.visits.push_back({0, Pass::kBackward});
  return model;
}

}  // namespace spillway::testing
