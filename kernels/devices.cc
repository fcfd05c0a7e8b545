#include "kernels/devices.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "kernels/cuda/loader.h"
#include "kernels/host_device.h"
#include "spillway/error.h"

namespace spillway {
namespace {

std::unique_ptr<Device> create_cuda(std::uint64_t hbm_bytes, HostWorkers&) {
  return create_cuda_device({.hbm_bytes = hbm_bytes});
}

std::string cuda_remedy() {
  std::string remedy = cuda_plugin_remedy();
  return remedy.empty() ? "`spillway doctor` looks closer" : remedy;
}

bool nvidia_driver_seen() { return std::filesystem::exists("/dev/nvidiactl") || std::filesystem::exists("/dev/dxg"); }

std::unique_ptr<Device> create_host(std::uint64_t hbm_bytes, HostWorkers& workers) {
  return create_host_device({.hbm_bytes = hbm_bytes}, workers);
}

std::string nothing() { return {}; }

constexpr DeviceType kDevices[] = {
    {.kind = DeviceKind::kCuda,
     .name = name_of(DeviceKind::kCuda),
     .hbm = "the GPU",
     .on_cpu = false,
     .create = create_cuda,
     .unavailable = cuda_unavailable,
     .remedy = cuda_remedy,
     .driver_seen = nvidia_driver_seen},
    {.kind = DeviceKind::kHost,
     .name = name_of(DeviceKind::kHost),
     .hbm = "HBM is emulated in RAM",
     .on_cpu = true,
     .create = create_host,
     .unavailable = nothing,
     .remedy = nothing,
     .driver_seen = [] { return true; }},
};

}  // namespace

std::span<const DeviceType> devices() { return kDevices; }

const DeviceType& device_of(DeviceKind kind) {
  const auto found = std::ranges::find(kDevices, kind, &DeviceType::kind);
  SPILLWAY_CHECK(found != std::end(kDevices), "a kind of device that has no row");
  return *found;
}

const DeviceType* device_named(std::string_view name) {
  const auto found = std::ranges::find(kDevices, name, &DeviceType::name);
  return found != std::end(kDevices) ? &*found : nullptr;
}

std::string ChosenDevice::why_missing() const {
  std::string all;
  for (const MissingDevice& device : missing) all += (all.empty() ? "" : "; ") + device.why;
  return all;
}

ChosenDevice choose_device(std::optional<DeviceKind> asked, std::span<const DeviceType> among) {
  ChosenDevice chosen;
  for (const DeviceType& type : among) {
    if (asked && *asked != type.kind) continue;
    chosen.type = &type;
    std::string why = type.unavailable();
    if (why.empty()) break;
    chosen.missing.push_back({&type, std::move(why)});
  }
  SPILLWAY_CHECK(chosen.type != nullptr, "a kind of device that has a row");
  return chosen;
}

}  // namespace spillway
