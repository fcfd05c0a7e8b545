// Which blocks a plan updates inside backward, at once or on a guess.
#include <gtest/gtest.h>

#include <algorithm>

#include "src/plan/plan.h"
#include "tests/src/random_model.h"
#include "tests/src/uneven_model.h"

namespace spillway {
namespace {

// Nothing says in backward that a block of any number has its last gradient.
TEST(UpdateInsideBackward, NoBlockOfAnyNumberOfGradientsIsInIt) {
  Config config = testing::config_for(Placement::kNvme, Placement::kNvme);
  ModelDescription model = testing::uneven_model();
  for (const double clipping : {0.0, 1.0}) {
    config.gradient_clipping = clipping;
    const auto early = clipping == 0 ? &BlockPlan::early : &BlockPlan::speculative;
    for (Block& block : model.blocks) block.parameters[0].pushes = 1;
    EXPECT_GT(std::ranges::count_if(make_plan(config, model).blocks, early), 1);
    model.blocks[1].parameters[0].pushes = kAnyPushes;
    EXPECT_FALSE(make_plan(config, model).blocks[1].*early);
    for (Block& block : model.blocks) block.parameters[0].pushes = kAnyPushes;
    const Plan plan = make_plan(config, model);
    EXPECT_FALSE(plan.early_blocks);
    EXPECT_EQ(std::ranges::count_if(plan.blocks, early), 0);
  }
}

}  // namespace
}  // namespace spillway
