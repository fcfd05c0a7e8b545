// Memory in RAM: the arenas (pinned host memory, and HBM of the `host` device), and what was registered for copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>

namespace spillway {

// Which budget an arena is: the words of its errors, and its name in /proc/PID/smaps (`[anon:spillway hbm]`).
struct ArenaName {
  const char* object;  // `HBM of the host device`
  const char* key;     // `hbm_bytes`
  const char* mapping;
};
inline constexpr ArenaName kHbmArena{"HBM of the host device", "hbm_bytes", "spillway hbm"};
inline constexpr ArenaName kPinnedArena{"host memory", "host_bytes", "spillway host"};

// Where the kernel says who gets huge pages; tests point it at a directory of their own.
inline constexpr const char* kHugePageFiles = "/sys/kernel/mm/transparent_hugepage";

// What an arena without huge pages costs: Adam over 32 Mi parameters (0.4 and 0.9 GB) on one thread, with and without
// PR_SET_THP_DISABLE, four times in turns on a Xeon of 2 cores: medians of 1.07 (bf16) and 1.20 (fp32). Measured with
// commit 175bca7's `adam_bench --benchmark_filter=33554432/threads:1`.
inline constexpr const char* kSmallPagesPrice = "Adam takes 7 to 20 % longer";

// Which arenas ask for huge pages: those that are so large that what is touched stays what is planned, or any, where a
// block in one piece of memory goes to the drive as one request, and in pages of 4 KiB does not.
enum class HugePages { kOfLargeArenas, kOfAny };

// Anonymous memory of exactly `bytes`, with pages that fault before and after it; pages are taken from the system when
// first written. A log line says when a large arena gets no huge pages.
class HostArena {
 public:
  HostArena(std::uint64_t bytes, const ArenaName& name, const std::filesystem::path& huge_page_files = kHugePageFiles,
            HugePages wanted = HugePages::kOfLargeArenas);  // throws Error
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  std::span<std::byte> memory() const noexcept { return memory_; }
  bool huge_pages() const noexcept { return huge_pages_; }
  std::uint64_t page_bytes() const noexcept;  // 2 MiB, or a page of the system
  bool contains(const void* data, std::size_t bytes) const noexcept;

 private:
  std::span<std::byte> reserved_, memory_;  // addresses taken; the arena inside them
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
