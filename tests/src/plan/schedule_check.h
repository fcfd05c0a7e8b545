// What must hold of every schedule, whatever it was made for. Each rule is checked from the operations' times alone,
// and not from what they say they waited for.
#pragma once

#include "src/plan/schedule.h"

namespace spillway::testing {

// Adds a failure for each rule that is broken.
void check_schedule(const ScheduleInput& input, const Schedule& schedule);

}  // namespace spillway::testing
