#include "swap/arena.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>

#include "spillway/error.h"
#include "spillway/units.h"

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace spillway {
namespace {
constexpr std::uint64_t kHugePage = 2 * kMiB;
}

HostArena::HostArena(std::uint64_t bytes) {
  if (bytes == 0) return;
  size_ = align_up(bytes, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
  void* data = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(Code::kDoesNotFit, {.object = "host memory",
                                    .happened = "reserving " + std::to_string(size_) + " bytes failed",
                                    .errno_value = errno,
                                    .hint = "lower spillway.host_bytes or raise the memory limit (ulimit -v)"});
  }
  data_ = static_cast<std::byte*>(data);
  // Large pages make pinning and copies cheaper, but a page is touched whole: only where 2 MiB is a small share.
  if (size_ >= 64 * kHugePage) ::madvise(data_, size_, MADV_HUGEPAGE);
  ::prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, data_, size_, "spillway host");  // shows in /proc/PID/smaps; may be refused
}

HostArena::~HostArena() {
  if (data_) ::munmap(data_, size_);
}

}  // namespace spillway
