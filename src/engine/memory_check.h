// Whether this machine has the memory that a plan takes. Being killed for memory has no message; refusing has.
#pragma once

#include <cstdint>

#include "spillway/device.h"
#include "src/plan/plan.h"

namespace spillway {

// Throws kDoesNotFit. `ranks`: processes with such a plan on this machine, none of which has its memory yet. Returns
// what is left beside the arenas, of this one's part.
std::uint64_t check_memory(const Plan& plan, DeviceKind device, std::uint32_t ranks = 1);

}  // namespace spillway
