#include "spillway/io_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {
constexpr std::uint64_t kHugePage = 2 * kMiB;
}  // namespace

IoMemory IoMemory::allocate(std::uint64_t bytes, std::uint64_t alignment, bool lock) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto refuse = [](std::string happened, const char* hint) {
    throw Error(Code::kInvalidArgument, {"memory for I/O", std::move(happened), 0, hint});
  };
  if (bytes == 0) refuse("its size is 0 bytes", "ask for some");
  if (!std::has_single_bit(alignment) || alignment > kGiB)
    refuse(fmt::format("its alignment is {}", alignment), "choose a power of two up to 1 GiB");
  const std::uint64_t unit = std::max(alignment, page);
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  // Whole pages, and as many more as the first multiple of the alignment may lie after the mapping's start.
  const std::uint64_t used = bytes > kMost ? kMost : align_up(bytes, page), all = used + (unit - page);
  void* const mapped = ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Error(Code::kDoesNotFit, {"memory for I/O", fmt::format("{} bytes cannot be mapped", bytes), errno,
                                    "ask for less, or raise ulimit -v"});
  }
  IoMemory memory;
  memory.mapped_ = {static_cast<std::byte*>(mapped), all};
  const auto first = align_up<std::uint64_t>(reinterpret_cast<std::uintptr_t>(mapped), unit);
  memory.bytes_ = {reinterpret_cast<std::byte*>(first), bytes};
  ::madvise(mapped, all, MADV_DONTFORK);  // refused by no kernel that has io_uring or AIO
  // A block is then one piece of memory, and not 256: the drive gets it whole, for a fifth of the processor time
  // (bench/tensor_peers.py). Where it is refused, the memory is as good and slower.
  if (used >= kHugePage) ::madvise(mapped, all, MADV_HUGEPAGE);
  if (lock) {
    memory.locked_ = ::mlock(memory.bytes_.data(), used) == 0;
    memory.lock_error_ = memory.locked_ ? 0 : errno;
  }
  return memory;
}

IoMemory::IoMemory(IoMemory&& other) noexcept { *this = std::move(other); }

IoMemory& IoMemory::operator=(IoMemory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(locked_, other.locked_);
  std::swap(lock_error_, other.lock_error_);
  return *this;
}

IoMemory::~IoMemory() {
  if (!mapped_.empty()) ::munmap(mapped_.data(), mapped_.size());
}

}  // namespace spillway
