// What libspillway_cuda.so exports: one function, spillway_cuda_plugin, that returns this table. The library opens it
// when a `cuda` device is asked for, so that the same program runs where there is no driver and no toolkit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/loader.h"
#include "kernels/device.h"
#include "spillway/log.h"

namespace spillway {

// Changes whenever Device, this table or a type that crosses it does.
inline constexpr std::uint32_t kCudaInterface = 8;
inline constexpr const char* kCudaPlugin = "libspillway_cuda.so";
inline constexpr const char* kCudaPluginEntry = "spillway_cuda_plugin";

struct CudaPlugin {
  std::uint32_t interface = 0;    // read before anything else
  const char* version = nullptr;  // of Spillway, which is the library's; read before what follows
  // Empty: there is a GPU that the driver serves. No context is made.
  std::string (*unavailable)();
  CurrentGpu (*current)();
  std::unique_ptr<Device> (*create)(const CudaDeviceOptions& options);
  // Where the plugin's messages go from now on: it may have a log of its own.
  void (*set_log)(internal::LogState& to);
};

}  // namespace spillway
