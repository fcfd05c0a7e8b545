// The `host` device: an emulated one, there on every machine. HBM is an arena in RAM, and each stream is a thread.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/device.h"

namespace spillway {

struct HostDeviceOptions {
  std::uint64_t hbm_bytes = 0;
  // For tests: each copy waits this long first.
  double copy_delay_seconds = 0;
};

// Kernels run on `workers`, which must outlive the device.
std::unique_ptr<Device> create_host_device(const HostDeviceOptions& options, HostWorkers& workers);

}  // namespace spillway
