// HBM of a store of named tensors: a device whose arena has the tensors, and copies to and from it. Which tensors lie
// there, and who leaves, is decided by tensor_store_hbm.cc. Thread: any number of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kernels/device.h"
#include "swap/extents.h"

namespace spillway {

class HbmMemory {
 public:
  // `host`: what is copied to and from, which outlives this. kUnsupported, kDoesNotFit.
  HbmMemory(std::uint64_t bytes, std::optional<DeviceKind> kind, std::span<std::byte> host);
  ~HbmMemory();
  HbmMemory(const HbmMemory&) = delete;
  HbmMemory& operator=(const HbmMemory&) = delete;

  std::span<std::byte> memory(const Extent& range) const { return device_->hbm().subspan(range.offset, range.bytes); }
  DeviceKind kind() const noexcept { return device_->kind(); }
  bool failed() const;                                    // for good
  void throw_if_failed(const std::string& tensor) const;  // kDevice

  // Copies that run one after the other, in the order of a stream of the store's or of the caller's.
  class Copies {
   public:
    // `tensor`, in errors, outlives it.
    Copies(HbmMemory& of, CopyKind kind, const std::string& tensor);
    // Of memory of the caller's; `native`: the caller's stream.
    Copies(HbmMemory& of, CopyKind kind, const std::string& tensor, void* native);
    ~Copies();  // waits
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;

    void add(std::byte* to, const std::byte* from, std::size_t bytes);
    // Blocks until all of them are done. Throws kDevice.
    void finish();

   private:
    HbmMemory& of_;
    const CopyKind kind_;
    const std::string& tensor_;
    const bool lent_ = false;
    std::unique_ptr<Stream> adopted_;
    Stream& stream_;
    bool under_way_ = false;
  };

 private:
  std::unique_ptr<Stream> adopt(void* native, const std::string& tensor) const;
  Stream& own(CopyKind kind) const { return kind == CopyKind::kDeviceToHost ? *down_ : *up_; }

  std::unique_ptr<HostWorkers> workers_;
  std::unique_ptr<Device> device_;
  const std::span<std::byte> host_;
  std::unique_ptr<Stream> up_, down_;
};

}  // namespace spillway
