// Which device a run has: what the configuration asks for, and what this machine has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "spillway/config.h"

namespace spillway {

std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers);
// Why a run that may have the cuda device has the host device; empty when it was asked for by name.
std::string why_not_cuda(const Config& config);

}  // namespace spillway
