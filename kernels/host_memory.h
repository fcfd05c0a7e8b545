// The memory of the `host` device: its HBM arena, and the host memory that was registered for copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>

namespace spillway {

// Anonymous memory of exactly `bytes`; pages are taken from the system when first written.
class HostArena {
 public:
  explicit HostArena(std::uint64_t bytes);  // throws Error
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::span<std::byte> memory() const noexcept { return memory_; }
  bool huge_pages() const noexcept { return huge_pages_; }
  bool contains(const void* data, std::size_t bytes) const noexcept;

 private:
  std::span<std::byte> memory_;
  std::size_t mapped_bytes_ = 0;
  bool huge_pages_ = false;
};

// Ranges of host memory that copies may name. A copy must lie in one range: memory registered in two pieces is two
// registrations to a GPU's driver as well.
class RegisteredMemory {
 public:
  void add(std::span<std::byte> memory);  // throws Error when empty or overlapping a range
  void remove(std::span<std::byte> memory) noexcept;
  bool contains(const void* data, std::size_t bytes) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> ranges_;  // begin → end
};

}  // namespace spillway
