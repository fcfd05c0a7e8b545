// Whether this machine has the memory that a plan takes. Being killed for memory has no message; refusing has.
#pragma once

#include <cstdint>

#include "spillway/device.h"
#include "src/plan/plan.h"

namespace spillway {

// Throws kDoesNotFit. Returns what is left beside the arenas.
std::uint64_t check_memory(const Plan& plan, DeviceKind device);

}  // namespace spillway
