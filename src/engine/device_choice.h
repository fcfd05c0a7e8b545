// Which device a run has: what the configuration asks for, and what this machine has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "spillway/config.h"

namespace spillway {

// The device of a run, which this machine need not have.
struct ChosenDevice {
  DeviceKind kind = DeviceKind::kHost;
  std::string no_cuda = {};  // why there is no cuda device here for a run that may have it; empty: there is
  bool here() const { return kind == DeviceKind::kHost || no_cuda.empty(); }
};
ChosenDevice choose_device(const Config& config);

std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers);

}  // namespace spillway
