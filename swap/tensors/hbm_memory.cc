#include "swap/tensors/hbm_memory.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/devices.h"
#include "kernels/workers.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

// What a training run's configuration calls these budgets, and what it can do about them, is of no use here.
std::unique_ptr<Device> make_device(const DeviceType& type, std::uint64_t bytes, HostWorkers& workers) {
  try {
    return type.create(bytes, workers);
  } catch (const Error& error) {
    if (error.code() != Code::kDoesNotFit) throw;
    throw Error(Code::kDoesNotFit, {"hbm_bytes", error.parts().happened, 0, "give less than is free"});
  }
}

[[noreturn]] void throw_for(const std::string& tensor, const Error& error) {
  throw Error(error.code(), {tensor, "the device failed: " + error.parts().happened, 0,
                             "open another store: host memory and NVMe still have what they had, which commit() "
                             "takes; remove what HBM alone had, or put it anew"});
}

}  // namespace

HbmMemory::HbmMemory(std::uint64_t bytes, std::optional<DeviceKind> kind, std::span<std::byte> host)
    : workers_(create_workers(1)), host_(host) {
  const ChosenDevice chosen = choose_device(kind);
  if (chosen.here() && !chosen.missing.empty()) {
    log(LogLevel::kInfo, fmt::format("tensor store: {} bytes of RAM stand for HBM: {}", bytes, chosen.why_missing()));
  }
  device_ = make_device(*chosen.type, bytes, *workers_);
  up_ = device_->create_stream("tensors up");
  down_ = device_->create_stream("tensors down");
  try {
    device_->register_host(host_);
  } catch (const Error& error) {
    throw Error(error.code(),
                {"host_bytes", error.parts().happened, 0, "give less, or raise the limit of this process (ulimit -l)"});
  }
}

HbmMemory::~HbmMemory() {
  up_.reset();
  down_.reset();
  device_->unregister_host(host_);
}

bool HbmMemory::failed() const {
  try {
    device_->throw_if_failed();
    return false;
  } catch (const Error&) {
    return true;
  }
}

void HbmMemory::throw_if_failed(const std::string& tensor) const {
  try {
    device_->throw_if_failed();
  } catch (const Error& error) {
    throw_for(tensor, error);
  }
}

// Where there are no streams but the device's own, a copy waits for nothing.
std::unique_ptr<Stream> HbmMemory::adopt(void* native, const std::string& tensor) const {
  try {
    return device_of(kind()).on_cpu ? nullptr : device_->adopt_stream(native);
  } catch (const Error& error) {
    throw_for(tensor, error);
  }
}

HbmMemory::Copies::Copies(HbmMemory& of, CopyKind kind, const std::string& tensor)
    : of_(of), kind_(kind), tensor_(tensor), stream_(of.own(kind)) {}

HbmMemory::Copies::Copies(HbmMemory& of, CopyKind kind, const std::string& tensor, void* native)
    : of_(of),
      kind_(kind),
      tensor_(tensor),
      lent_(true),
      adopted_(of.adopt(native, tensor)),
      stream_(adopted_ ? *adopted_ : of.own(kind)) {}

HbmMemory::Copies::~Copies() {
  if (under_way_) stream_.synchronize();
}

void HbmMemory::Copies::add(std::byte* to, const std::byte* from, std::size_t bytes) {
  under_way_ = true;
  if (lent_) {
    of_.device_->copy_lent_async(kind_, to, from, bytes, stream_);
  } else {
    of_.device_->copy_async(kind_, to, from, bytes, stream_);
  }
}

void HbmMemory::Copies::finish() {
  stream_.synchronize();
  under_way_ = false;
  of_.throw_if_failed(tensor_);
}

}  // namespace spillway
