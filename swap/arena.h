// One piece of host memory, reserved once at its exact size and divided by planned offsets. Pages are touched only where
// something is written, so that resident memory equals what the ledger lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace spillway {

class HostArena {
 public:
  // `bytes` is rounded up to a page. Throws kDoesNotFit when the address space or memory limit refuses it.
  explicit HostArena(std::uint64_t bytes);
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
  ~HostArena();

  std::span<std::byte> bytes() const noexcept { return {data_, size_}; }
  std::byte* at(std::uint64_t offset) const noexcept { return data_ + offset; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace spillway
