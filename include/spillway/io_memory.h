// Memory that direct I/O can use: aligned, whole pages of its own, and locked in RAM where the system allows it.
//
// Whoever allocates it owns it; it must outlive every transfer of it and every queue that has it as a region. Thread:
// any. A forked process does not have it: fork(2) would copy pages into which a drive may be writing.
#pragma once

#include "spillway/cplusplus.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace spillway {

class IoMemory {
 public:
  // Zeros, at a multiple of `alignment`: a power of two up to 1 GiB, raised to the page's size where it is less. Locked
  // memory is taken from the system at once, other memory when it is first written; from 2 MiB on in huge pages, as far
  // as the system has them free. Throws kInvalidArgument, and kDoesNotFit where the system has not so much.
  static IoMemory allocate(std::uint64_t bytes, std::uint64_t alignment = 4096, bool lock = true);

  IoMemory(IoMemory&& other) noexcept;
  IoMemory& operator=(IoMemory&& other) noexcept;
  ~IoMemory();

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  // Whether it stays in RAM; if not, why mlock(2) was refused (ENOMEM, EPERM: ulimit -l), or 0: it was not asked.
  bool locked() const noexcept { return locked_; }
  int lock_error() const noexcept { return lock_error_; }

 private:
  IoMemory() = default;
  std::span<std::byte> bytes_, mapped_;
  bool locked_ = false;
  int lock_error_ = 0;
};

}  // namespace spillway
