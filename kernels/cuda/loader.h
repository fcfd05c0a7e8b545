// The `cuda` device as the rest of the library sees it: opened at run time, from a plugin (plugin.h), so that one
// binary serves machines with and without a driver. Any thread may call. No call but create_cuda_device() makes a
// context.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device.h"

namespace spillway {

struct CudaDeviceOptions {
  std::uint64_t hbm_bytes = 0;
};

// This thread's GPU (current_gpu()), in whatever thread it is used. Throws kUnsupported when there is none, saying why,
// and kDoesNotFit when it has less free memory than asked for.
std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& options);
// Why there cannot be a cuda device in this process; empty when there can. Cheap.
std::string cuda_unavailable();
// What to do about it where the plugin is what is missing or wrong; else empty.
std::string cuda_plugin_remedy();

// The GPU that a `cuda` device would be on that this thread makes now: CUDA's current one, the first that it shows
// unless the program has chosen another (cudaSetDevice, torch.cuda.set_device).
struct CurrentGpu {
  int number = 0;  // as CUDA counts in this process
  std::string id;  // its UUID: the same in every process that sees it
};
// There is one (cuda_unavailable()). Throws kDevice.
CurrentGpu current_gpu();

}  // namespace spillway
