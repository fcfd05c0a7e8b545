// Where the plan puts activations and insides, and what it says about it.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "spillway/error.h"
#include "spillway/units.h"
#include "src/plan/plan_summary.h"
#include "tests/src/named_budget.h"
#include "tests/swap/activation_uses.h"

namespace spillway {
namespace {

constexpr std::uint32_t kLayers = 6, kMicroBatches = 4;
constexpr std::uint64_t kBytes = kMiB, kInside = 10 * kMiB;

ModelDescription model() {
  ModelDescription model;
  for (std::uint32_t b = 0; b < kLayers; ++b) {
    const std::string name = "h." + std::to_string(b);
    model.blocks.push_back(
        {.name = name, .parameters = {{.name = name + ".weight", .shape = {100, 100}}}, .inside_bytes = kInside});
  }
  model.activation_uses = testing::transformer_uses(kLayers, kMicroBatches);
  model.activations.assign((kLayers + 1) * kMicroBatches, {.bytes = kBytes});
  model.activations_held = 2;
  model.micro_batches = kMicroBatches;
  return model;
}

Config config_for(Placement placement) {
  Config config;
  config.weights = DType::kBFloat16;
  config.parameters = config.states = placement;
  if (placement == Placement::kNvme) config.nvme_paths = {"/drive"};
  return config;
}

std::uint64_t least_hbm(Config config) {
  config.hbm_bytes = 1;
  return testing::named_bytes(testing::refused_plan(config, model()));
}

std::string text_of(const Config& config, const Plan& plan) {
  std::string text;
  for (const std::string& fact : activation_summary(config, plan, model())) text += fact + "\n";
  return text;
}

std::size_t kept(const Plan& plan) { return std::ranges::count_if(plan.blocks, &BlockPlan::insides_kept); }

TEST(PlanActivations, WithoutABudgetAllStayInHbmAndNoInsidesAreKept) {
  const Config config = config_for(Placement::kNvme);
  const Plan plan = make_plan(config, model());
  EXPECT_TRUE(plan.activations.uses.empty());
  EXPECT_EQ(kept(plan), 0u);
  EXPECT_NE(text_of(config, plan).find("activations: 28 of 28 MiB, all in hbm\n"), std::string::npos)
      << text_of(config, plan);
  EXPECT_NE(text_of(config, plan)
                .find("0 of 6 blocks keep their inner activations: backward recomputes 6 blocks; 40 MiB "
                      "more of hbm_bytes save one"),
            std::string::npos)
      << text_of(config, plan);
}

// A tight hbm_bytes alone takes host memory; a tight host_bytes too takes NVMe; without NVMe it is refused.
TEST(PlanActivations, WhatDoesNotFitHbmGoesToHostMemoryAndThenToNvme) {
  Config config = config_for(Placement::kNvme);
  config.hbm_bytes = least_hbm(config);
  const Plan in_host = make_plan(config, model());
  EXPECT_EQ(in_host.activations.places.size(), 2u);
  EXPECT_EQ(in_host.nvme.activations.bytes, 0u);
  EXPECT_NE(text_of(config, in_host)
                .find("activations: 2 of 28 in hbm at a time; 28 MiB at home in host memory, 0 MiB on nvme"),
            std::string::npos)
      << text_of(config, in_host);

  config.host_bytes = in_host.ledger.total(Placement::kHost) - 10 * kMiB;
  const Plan both = make_plan(config, model());
  EXPECT_GT(both.nvme.activations.bytes, 0u);
  EXPECT_LT(both.nvme.activations.bytes, 28 * kBytes);
  // The gradient of each micro-batch moves in every layer, an input once each way: host memory is for what moves most.
  for (std::uint32_t b = 0; b < kMicroBatches; ++b) {
    EXPECT_EQ(both.activations.homes[kLayers * kMicroBatches + b].home, Placement::kHost) << b;
  }

  config.host_bytes = 1;
  config.host_bytes = testing::named_bytes(testing::refused_plan(config, model()));
  const Plan on_nvme = make_plan(config, model());
  EXPECT_EQ(on_nvme.nvme.activations.bytes, 28 * kBytes);
  EXPECT_GE(on_nvme.scratch_bytes, 28 * kBytes);
  const auto line = std::ranges::find_if(on_nvme.ledger.reservations, [](const Reservation& reservation) {
    return reservation.tier == Placement::kNvme && reservation.purpose == "activations";
  });
  ASSERT_NE(line, on_nvme.ledger.reservations.end());
  EXPECT_EQ(line->bytes, 28 * kBytes);

  Config memory = config_for(Placement::kHost);
  memory.hbm_bytes = least_hbm(memory);
  const std::uint64_t needed = make_plan(memory, model()).ledger.total(Placement::kHost);
  memory.host_bytes = needed - kMiB;
  const Error error = testing::refused_plan(memory, model());
  EXPECT_EQ(error.parts().object, "spillway.host_bytes");
  EXPECT_LE(testing::named_bytes(error), needed);
}

// First what everything needs, then places for all activations, then insides, block by block.
TEST(PlanActivations, WhatIsLeftOfAnExplicitBudgetKeepsInsides) {
  Config config = config_for(Placement::kNvme);
  const std::uint64_t all = make_plan(config, model()).ledger.total(Placement::kHbm);
  std::size_t before = 0;
  for (std::uint64_t more = 0; more <= 240 * kMiB; more += 10 * kMiB) {
    config.hbm_bytes = all + more;
    const Plan plan = make_plan(config, model());
    EXPECT_TRUE(plan.activations.uses.empty());
    // With the insides of all blocks kept, the memory that they share otherwise is not needed.
    EXPECT_EQ(kept(plan), more + kInside >= 6 * 40 * kMiB ? 6 : more / (40 * kMiB)) << more;
    EXPECT_GE(kept(plan), before);
    before = kept(plan);
  }
  EXPECT_NE(text_of(config, make_plan(config, model()))
                .find("6 of 6 blocks keep their inner activations: backward recomputes no block"),
            std::string::npos);
  config.hbm_bytes = all - kPartitionUnit * 4;
  EXPECT_FALSE(make_plan(config, model()).activations.uses.empty());
}

// Whatever comes before insides takes its part of what is added: places for weights, activations.
TEST(PlanActivations, TheBytesThatWouldKeepOneMoreDoSoAndAMiBLessDoesNot) {
  for (const Placement placement : {Placement::kNvme, Placement::kHost}) {
    Config config = config_for(placement);
    const std::uint64_t least = least_hbm(config), all = make_plan(config, model()).ledger.total(Placement::kHbm);
    std::size_t beyond_one = 0;
    for (std::uint64_t bytes = least; bytes < all + 200 * kMiB; bytes += 3'333'333) {
      config.hbm_bytes = bytes;
      const Plan plan = make_plan(config, model());
      ASSERT_LT(kept(plan), kLayers);
      const std::uint64_t more = bytes_to_keep_insides(config, model(), plan);
      EXPECT_NE(text_of(config, plan).find(" " + std::to_string(more / kMiB) + " MiB more of hbm_bytes save"),
                std::string::npos)
          << text_of(config, plan);
      beyond_one += more > kMicroBatches * kInside;
      config.hbm_bytes = bytes + more;
      EXPECT_GT(kept(make_plan(config, model())), kept(plan)) << bytes << " and " << more;
      config.hbm_bytes = bytes + more - kMiB;
      EXPECT_EQ(kept(make_plan(config, model())), kept(plan)) << bytes << " and " << more;
    }
    EXPECT_GT(beyond_one, 0u) << "activations take some of it";
  }
}

TEST(PlanActivations, WithoutAnOrderOfUsesTheyMustAllFitHbm) {
  ModelDescription without = model();
  without.activation_uses.clear();
  Config config = config_for(Placement::kNvme);
  config.hbm_bytes = least_hbm(config);
  EXPECT_GT(testing::named_bytes(testing::refused_plan(config, without)), *config.hbm_bytes + 20 * kBytes);
}

TEST(PlanActivations, ADescriptionThatContradictsItselfIsRefused) {
  const Config config = config_for(Placement::kHbm);
  const auto expect_refused = [&](const std::function<void(ModelDescription&)>& change, const char* text) {
    ModelDescription changed = model();
    change(changed);
    const Error error = testing::refused_plan(config, changed);
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  };
  expect_refused([](auto& m) { m.activations[3].bytes = 0; }, "activation 3: has no bytes");
  expect_refused([](auto& m) { m.activations_held = 0; }, "activations_held is 0");
  expect_refused([](auto& m) { m.micro_batches = 0; }, "micro_batches is 0");
  expect_refused([](auto& m) { m.activation_uses.push_back({28, Access::kWrite}); }, "activation 28: is used and not");
  expect_refused([](auto& m) { m.activation_uses[0].access = Access::kRead; }, "activation 0: is read before");
}

std::uint64_t listed(const Plan& plan, Placement tier, const std::string& purpose) {
  std::uint64_t sum = 0;
  for (const Reservation& line : plan.ledger.reservations) {
    if (line.tier == tier && line.purpose == purpose && line.outside) sum += line.bytes;
  }
  return sum;
}

// As of a PyTorch loop: host memory as far as it goes, which caches nothing then, and the drives for the rest.
TEST(PlanActivations, WhatTheProgramKeepsIsPartOfTheBudgets) {
  Config config = config_for(Placement::kNvme);
  ModelDescription description = model();
  description.activations.clear();
  description.activation_uses.clear();
  const Plan without = make_plan(config, description);
  config.host_bytes = without.ledger.total(Placement::kHost) + 8 * kMiB;
  for (std::uint64_t kept : {8 * kMiB, 20 * kMiB}) {
    description.kept_host_bytes = kept;
    const Plan plan = make_plan(config, description);
    EXPECT_EQ(listed(plan, Placement::kHost, "block inputs"), 8 * kMiB);
    EXPECT_EQ(listed(plan, Placement::kNvme, "block inputs"), kept - 8 * kMiB);
    EXPECT_EQ(plan.ledger.total(Placement::kHost), without.ledger.total(Placement::kHost));
    EXPECT_EQ(plan.ledger.host_budget, *config.host_bytes);
    EXPECT_EQ(plan.ledger.nvme_budget, plan.store_bytes + kept - 8 * kMiB);
  }
  EXPECT_NE(activation_summary(config, make_plan(config, description), description).back().find("12 MiB on nvme"),
            std::string::npos);
  config.nvme_bytes = make_plan(config, description).ledger.nvme_budget - 1;
  EXPECT_EQ(testing::refused_plan(config, description).parts().object, "spillway.nvme_bytes");
  Config in_host = config_for(Placement::kHost);
  in_host.host_bytes = description.kept_host_bytes;
  EXPECT_EQ(testing::refused_plan(in_host, description).parts().object, "spillway.host_bytes");
}

}  // namespace
}  // namespace spillway
