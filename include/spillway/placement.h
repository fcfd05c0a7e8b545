// Where something lives: the tiers, by the words of the configuration's offload devices.
#pragma once

#include "spillway/cplusplus.h"

#include <cstdint>

namespace spillway {

enum class Placement : std::uint8_t { kHbm, kHost, kNvme };  // none, cpu, nvme

}  // namespace spillway
