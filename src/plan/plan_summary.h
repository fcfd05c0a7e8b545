// What a plan says of itself, for people; one fact a line.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/plan/plan.h"

namespace spillway {

// What a step finds in place; then what each of DeepSpeed's knobs that is set changes, a line each, and one line with
// those that change nothing: the plan is compared with the one that plan_for() makes without the knob, or that has no
// room in the same budgets.
std::vector<std::string> describe_plan(const Config& config, const Plan& plan,
                                       const std::function<Plan(const Config&)>& plan_for);

// What was decided on activations and inner activations.
std::vector<std::string> activation_summary(const Config& config, const Plan& plan, const ModelDescription& model);

}  // namespace spillway
