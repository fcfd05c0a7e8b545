// The devices by name: the one place that knows all of them. What else differs between two devices than a Device
// (device.h) does is a column here, so that nobody else compares kinds: a new device is a kind in spillway/device.h,
// and a row. Any thread may call.
//
// A test that needs a device which this machine has not, or which there is not at all, gives rows of its own to
// choose_device(). Nothing is registered, so no test changes what another one finds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/device.h"

namespace spillway {

class Device;

struct DeviceType {
  DeviceKind kind = DeviceKind::kHost;
  std::string_view name;  // in the configuration, and in messages
  std::string_view hbm;   // what its HBM is, as the configuration's reference has it
  // Its HBM is RAM, and its kernels and the tasks of its streams run on the CPU's cores.
  bool on_cpu = false;
  // Throws kUnsupported where it is unavailable, and kDoesNotFit. `workers` outlive the device.
  std::unique_ptr<Device> (*create)(std::uint64_t hbm_bytes, HostWorkers& workers) = nullptr;
  // Why there cannot be one in this process; empty: there can. Cheap.
  std::string (*unavailable)() = nullptr;
  std::string (*remedy)() = nullptr;  // what to do where it is unavailable
  bool (*driver_seen)() = nullptr;    // whether this machine looks as if it had one nevertheless
};

// In the order in which `auto` tries them. The last one is available everywhere.
std::span<const DeviceType> devices();

const DeviceType& device_of(DeviceKind kind);
// Null: there is none of this name.
const DeviceType* device_named(std::string_view name);

// A device that may be chosen, and that this machine does not have.
struct MissingDevice {
  const DeviceType* type = nullptr;
  std::string why;
};

// The device that `asked` names, which this machine need not have; if it names none, the first that is here.
struct ChosenDevice {
  const DeviceType* type = nullptr;  // never null
  std::vector<MissingDevice> missing = {};
  DeviceKind kind() const { return type->kind; }
  bool here() const { return missing.empty() || missing.back().type != type; }
  // Why the devices that are missing are; empty: none is.
  std::string why_missing() const;
};
ChosenDevice choose_device(std::optional<DeviceKind> asked, std::span<const DeviceType> among = devices());

}  // namespace spillway
