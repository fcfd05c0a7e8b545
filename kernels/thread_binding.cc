#include "kernels/thread_binding.h"

#include <sched.h>

namespace spillway {
namespace {

constexpr std::size_t kMaskBytes = CpuMask::kCpus / CHAR_BIT;

}  // namespace

CpuMask::CpuMask(std::span<const unsigned> cpus) {
  for (unsigned cpu : cpus) {
    if (cpu < kCpus) words_[cpu / kWordBits] |= 1ul << cpu % kWordBits;
  }
}

bool bind_this_thread(const CpuMask& mask) noexcept {
  return sched_setaffinity(0, kMaskBytes, reinterpret_cast<const cpu_set_t*>(mask.words_.data())) == 0;
}

ThreadBinding::ThreadBinding(const CpuMask& mask) noexcept {
  // What cannot be given back is not taken.
  if (sched_getaffinity(0, kMaskBytes, reinterpret_cast<cpu_set_t*>(before_.words_.data())) != 0) return;
  bound_ = bind_this_thread(mask);
}

ThreadBinding::~ThreadBinding() {
  if (bound_) sched_setaffinity(0, kMaskBytes, reinterpret_cast<const cpu_set_t*>(before_.words_.data()));
}

}  // namespace spillway
