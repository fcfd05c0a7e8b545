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

// What is said where `auto` leaves a GPU idle whose driver is `seen`, and why; empty: nothing is.
std::string idle_gpu(bool seen, const std::string& no_cuda, const std::string& remedy);

std::unique_ptr<Device> create_device(const Config& config, std::uint64_t hbm_bytes, HostWorkers& workers);

}  // namespace spillway
