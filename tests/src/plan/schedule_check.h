// What must hold of every schedule, whatever it was made for. Each rule is checked from the operations' times alone,
// and not from what they say they waited for.
#pragma once

#include "src/plan/schedule.h"

namespace spillway::testing {

// Of an input that is put together by hand: which blocks and tiles there are, what is updated, in order.
void tell_policies(ScheduleInput& input);

// Adds a failure for each rule that is broken.
void check_schedule(const ScheduleInput& input, const Schedule& schedule);

}  // namespace spillway::testing
