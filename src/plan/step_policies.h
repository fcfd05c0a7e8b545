// What the policies of a step (swap/policy) are told of a plan: said once, for the engine, which does what they answer,
// and for the schedule, which runs the same objects on its virtual clock. Pure.
#pragma once

#include "src/plan/plan.h"
#include "swap/policy/gradient_memory.h"
#include "swap/policy/update_queue.h"
#include "swap/policy/weight_residency.h"

namespace spillway {

struct StepPolicies {
  WeightResidencyOptions weights;
  GradientMemoryOptions gradients;
  UpdateQueueOptions updates;
};

// `nodes` of the machine.
StepPolicies step_policies(const Plan& plan, unsigned nodes = 1);

}  // namespace spillway
