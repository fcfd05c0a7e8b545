// Whether this machine has the memory that a plan takes: a process that is killed for want of memory gives no message,
// a refusal does. How much the plan takes was decided before (src/plan); here it is only compared.
#pragma once

#include <cstdint>

#include "spillway/device.h"
#include "src/plan/plan.h"

namespace spillway {

// Throws kDoesNotFit. `ranks`: processes with such a plan on this machine, none of which has its memory yet. Returns
// what is left beside the arenas, of this one's part.
std::uint64_t check_memory(const Plan& plan, DeviceKind device, std::uint32_t ranks = 1);

}  // namespace spillway
