// Which device a run has: what the configuration asks for, and what this machine has (kernels/devices.h). How several
// ranks agree on one is said in gpu_ranks.h (agree_on_device()).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/device.h"
#include "kernels/devices.h"
#include "spillway/config.h"

namespace spillway {

// What is said where `auto` leaves a GPU idle whose driver is seen, and why; empty: nothing is.
std::string idle_gpu(const ChosenDevice& chosen);

// Throws kUnsupported where the one that the configuration names is not here.
std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers,
                                      std::span<const DeviceType> among = devices());

}  // namespace spillway
