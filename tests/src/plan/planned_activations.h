// Random activations and insides for a model, and what must hold of them in every plan.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "src/plan/plan.h"
#include "tests/swap/activation_uses.h"

namespace spillway::testing {

inline void add_activations(ModelDescription& model, std::mt19937_64& random) {
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  for (Block& block : model.blocks) block.inside_bytes = below(2) * below(50'000);
  model.micro_batches = static_cast<std::uint32_t>(1 + below(3));
  if (below(2) == 0) {
    model.activation_uses = random_uses(random, static_cast<std::uint32_t>(1 + below(9)));
    std::uint32_t most = 0;
    for (const ActivationUse& use : model.activation_uses) most = std::max(most, use.activation);
    for (std::uint32_t a = 0; a <= most; ++a) model.activations.push_back({1 + below(4) * below(300'000)});
    model.activations_held = static_cast<std::uint32_t>(1 + below(3));
    if (below(4) == 0) model.activation_uses.clear();
  }
}

// Each has its own place, or what leaves has a home that nothing else has.
inline void expect_activations(const Plan& plan, const ModelDescription& model) {
  const ActivationPlan& activations = plan.activations;
  if (activations.uses.empty()) {
    ASSERT_EQ(activations.places.size(), model.activations.size());
    for (std::size_t a = 0; a < model.activations.size(); ++a) {
      EXPECT_EQ(activations.places[a].bytes, model.activations[a].bytes);
    }
    return;
  }
  ASSERT_EQ(activations.uses.size(), model.activation_uses.size());
  EXPECT_GE(activations.places.size(), model.activations_held);
  for (const Region& place : activations.places) {
    for (const Activation& activation : model.activations) EXPECT_GE(place.bytes, activation.bytes);
  }
  std::uint64_t scratch = 0;
  for (std::size_t u = 0; u < activations.uses.size(); ++u) {
    const std::uint32_t a = model.activation_uses[u].activation;
    if (!activations.uses[u].spill) continue;
    EXPECT_NE(activations.homes[a].home, Placement::kHbm);
  }
  std::map<std::uint64_t, std::uint64_t> extents;
  for (std::size_t a = 0; a < activations.homes.size(); ++a) {
    if (activations.homes[a].home != Placement::kNvme) continue;
    extents[activations.homes[a].offset] = align_up(model.activations[a].bytes, kExtentAlignment);
    EXPECT_GE(activations.up.bytes, plan.host.chunk_bytes);
    EXPECT_GE(activations.down.bytes, plan.host.chunk_bytes);
  }
  for (const auto& [offset, bytes] : extents) {
    EXPECT_EQ(offset, scratch) << "overlaps, or leaves a hole";
    scratch += bytes;
  }
  EXPECT_EQ(plan.nvme.activations.bytes, scratch);
  EXPECT_EQ(plan.nvme.activations.offset, plan.has_store ? plan.spill_bytes : 0);
  EXPECT_LE(plan.spill_bytes + scratch, plan.scratch_bytes);
}

}  // namespace spillway::testing
