// What the ranks that a launcher has started do together.
#pragma once

#include "tools/doctor/finding.h"

namespace spillway::doctor {

// Every rank calls it; the first one gets the findings. Throws what ends a communicator.
Findings check_ranks();

}  // namespace spillway::doctor
