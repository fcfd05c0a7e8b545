#include "kernels/cuda/loader.h"

#include <string>

#include "kernels/cuda/plugin.h"
#include "kernels/plugin_file.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/version.h"

namespace spillway {
namespace {

constexpr const char* kGetOne =
    "the wheel spillway_cuda of `tools/wheel.sh --cuda` brings it, and so does a build with nvcc 12.8 or newer";
constexpr const char* kMatchingOne = "install Spillway and spillway-cuda " SPILLWAY_VERSION ", or both from one build";

OpenedPlugin<CudaPlugin> open_cuda_plugin() {
  auto opened = open_plugin<CudaPlugin>({.name = kCudaPlugin,
                                         .entry = kCudaPluginEntry,
                                         .interface = kCudaInterface,
                                         .part = reinterpret_cast<const void*>(&create_cuda_device),
                                         .get_one = kGetOne,
                                         .matching_one = kMatchingOne});
  if (opened.table != nullptr) opened.table->set_log(internal::log_state());
  return opened;
}

const OpenedPlugin<CudaPlugin>& opened() {
  static const auto once = open_cuda_plugin();
  return once;
}

}  // namespace

std::string cuda_unavailable() {
  if (opened().table == nullptr) {
    return "the plugin of the cuda device was not opened: " + opened().why;
  }
  return opened().table->unavailable();
}

std::string cuda_plugin_remedy() { return opened().remedy; }

CurrentGpu current_gpu() {
  SPILLWAY_CHECK(opened().table != nullptr, "of a cuda device that is there");
  return opened().table->current();
}

std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& options) {
  if (const std::string why = cuda_unavailable(); !why.empty()) {
    throw Error(Code::kUnsupported,
                {"device cuda", why, 0, opened().table ? "`spillway doctor` looks closer" : opened().remedy});
  }
  return opened().table->create(options);
}

}  // namespace spillway
