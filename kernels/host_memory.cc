#include "kernels/host_memory.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

#ifndef PR_SET_VMA  // kernel headers before 5.17
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace spillway {
namespace {

// Huge pages save page-table walks, but the first write to a region takes 2 MiB, and what is touched must equal what is
// planned within 2 %. From 128 MiB on the rounding of a region is lost in that; below it, small pages.
constexpr std::uint64_t kHugePageArena = 128 * kMiB;
constexpr std::uint64_t kHugePage = 2 * kMiB;

std::uint64_t small_page() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

// Where the administrator switched them off, madvise(2) succeeds and has no effect. Documentation/admin-guide/mm/
// transhuge.rst: one file for all sizes; since Linux 6.8 one for this size, which may defer to it (`[inherit]`).
bool switched_off(const std::filesystem::path& files) {
  const auto chosen = [](const std::filesystem::path& file) {
    std::ifstream in(file);
    for (std::string word; in >> word;) {
      if (word.front() == '[') return word;
    }
    return std::string();
  };
  const std::string own = chosen(files / "hugepages-2048kB" / "enabled");
  return (own.empty() || own == "[inherit]" ? chosen(files / "enabled") : own) == "[never]";
}

void no_huge_pages(const ArenaName& name, const std::string& why) {
  log(LogLevel::kWarning,
      fmt::format("{} gets no huge pages ({}): {} on small ones", name.object, why, kSmallPagesPrice));
}

}  // namespace

HostArena::HostArena(std::uint64_t bytes, const ArenaName& name, const std::filesystem::path& huge_page_files,
                     HugePages wanted) {
  const std::string object = name.object, key = name.key;
  if (bytes == 0) throw Error(Code::kInvalidArgument, {object, "its size is 0 bytes", 0, "set " + key});
  mapped_bytes_ = align_up(bytes, small_page());
  if (mapped_bytes_ < bytes) throw Error(Code::kInvalidArgument, {object, "its size overflows", 0, "lower " + key});
  const std::uint64_t reserved = mapped_bytes_ + 2 * kHugePage;
  // Not reserved: the budget is checked by the plan, and swap accounting would count it a second time.
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* all = reserved < mapped_bytes_ ? MAP_FAILED : mmap(nullptr, reserved, PROT_NONE, kFlags, -1, 0);
  // What is left over on both sides stays without access: a pointer that leaves the arena faults, and the kernel does
  // not merge two arenas into one mapping, which smaps could not tell apart.
  const std::uint64_t first = align_up(reinterpret_cast<std::uintptr_t>(all) + 1, kHugePage);
  void* base = reinterpret_cast<void*>(first);
  if (all == MAP_FAILED || mprotect(base, mapped_bytes_, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    if (all != MAP_FAILED) munmap(all, reserved);
    throw Error(Code::kDoesNotFit, {object, fmt::format("cannot map {} bytes", mapped_bytes_), error,
                                    "lower " + key + " or raise ulimit -v"});
  }
  reserved_ = {static_cast<std::byte*>(all), reserved};
  prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, base, mapped_bytes_, name.mapping);  // for smaps; older kernels refuse it
  memory_ = {static_cast<std::byte*>(base), bytes};
  // A forked process (a DataLoader's worker) has nothing to do here, and of pinned pages it would get a copy at once:
  // fork(2) does not share what a drive or a GPU may write to.
  if (madvise(base, mapped_bytes_, MADV_DONTFORK) != 0) {
    log(LogLevel::kWarning, fmt::format("{} is copied into every process that is forked ({})", name.object,
                                        std::generic_category().message(errno)));
  }
  const bool large = bytes >= kHugePageArena;
  huge_pages_ = (large || wanted == HugePages::kOfAny) && madvise(base, mapped_bytes_, MADV_HUGEPAGE) == 0;
  const int refused = errno;
  if (huge_pages_ && switched_off(huge_page_files)) {
    huge_pages_ = false;
    if (large) no_huge_pages(name, "transparent_hugepage/enabled is never");
  } else if (large && !huge_pages_) {
    no_huge_pages(name, "madvise: " + std::generic_category().message(refused));
  }
  // Refused only by kernels without huge pages, which then give none anyway.
  if (!huge_pages_) madvise(base, mapped_bytes_, MADV_NOHUGEPAGE);
}

std::uint64_t HostArena::page_bytes() const noexcept { return huge_pages_ ? kHugePage : small_page(); }

HostArena::~HostArena() { munmap(reserved_.data(), reserved_.size()); }

bool HostArena::contains(const void* data, std::size_t bytes) const noexcept {
  const auto base = reinterpret_cast<std::uintptr_t>(memory_.data());
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return address >= base && address - base <= memory_.size() && bytes <= memory_.size() - (address - base);
}

void RegisteredMemory::add(std::span<std::byte> memory) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const auto end = begin + memory.size();
  const std::string object = fmt::format("host memory {:#x}, {} bytes", begin, memory.size());
  if (memory.empty())
    throw Error(Code::kInvalidArgument, {object, "cannot be registered empty", 0, "register at least a byte"});
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.upper_bound(begin);
  const bool overlaps_next = next != ranges_.end() && next->first < end;
  const bool overlaps_previous = next != ranges_.begin() && std::prev(next)->second > begin;
  if (overlaps_next || overlaps_previous) {
    throw Error(Code::kInvalidArgument,
                {object, "overlaps memory that is registered already", 0, "unregister that first"});
  }
  ranges_.emplace(begin, end);
}

void RegisteredMemory::remove(std::span<std::byte> memory) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(begin);
  SPILLWAY_CHECK(range != ranges_.end() && range->second == begin + memory.size(),
                 "only what was registered can be unregistered");
  ranges_.erase(range);
}

bool RegisteredMemory::contains(const void* data, std::size_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.upper_bound(begin);
  if (next == ranges_.begin()) return false;
  const auto end = std::prev(next)->second;
  return begin <= end && bytes <= end - begin;
}

}  // namespace spillway
