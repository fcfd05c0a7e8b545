// Binds the calling thread to CPUs for a while. By sched_setaffinity(2) and not by hwloc, whose binding allocates on
// every call.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <span>

namespace spillway {

// As the kernel takes it, and as long as any Linux's own (NR_CPUS), so that sched_getaffinity(2) never finds it short.
class CpuMask {
 public:
  CpuMask() = default;
  explicit CpuMask(std::span<const unsigned> cpus);

  static constexpr std::size_t kCpus = 8192;

 private:
  friend class ThreadBinding;
  friend bool bind_this_thread(const CpuMask& mask) noexcept;
  static constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kCpus / kWordBits> words_{};
};

// For good, and with it what the thread starts later. False with errno.
bool bind_this_thread(const CpuMask& mask) noexcept;

// Whose thread it is does not matter: it gets its old mask back.
class ThreadBinding {
 public:
  explicit ThreadBinding(const CpuMask& mask) noexcept;
  ~ThreadBinding();
  ThreadBinding(const ThreadBinding&) = delete;
  ThreadBinding& operator=(const ThreadBinding&) = delete;

  bool bound() const noexcept { return bound_; }

 private:
  CpuMask before_;
  bool bound_ = false;
};

}  // namespace spillway
