#include "src/plan/step_policies.h"

namespace spillway {

StepPolicies step_policies(const Plan& plan) {
  StepPolicies policies;
  for (const BlockPlan& block : plan.blocks) {
    const DType type = plan.tile_places[block.first_tile].shape.type;
    policies.gradients.blocks.push_back(
        {.bytes = block.partition.trainable_elements * size_of(type), .home = block.gradient_home});
  }
  for (const Region& staging : plan.hbm.staging) policies.gradients.staging_bytes.push_back(staging.bytes);
  for (const Region& passing : plan.host.passing) policies.gradients.passing_bytes.push_back(passing.bytes);
  return policies;
}

}  // namespace spillway
