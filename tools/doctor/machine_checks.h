// Facts of the machine in, findings out. Pure.
#pragma once

#include "tools/doctor/finding.h"
#include "tools/doctor/machine.h"
#include "tools/doctor/need.h"

namespace spillway::doctor {

// kernel; wsl and container where there is one.
Findings check_kernel(const KernelFacts& kernel, const RingFacts& ring);
// io_uring and, where it is to be had, memlock.
Findings check_ring(const RingFacts& ring, const KernelFacts& kernel, const Need& need);
// plan (of a model), memory, swap, overcommit, address space, huge pages.
Findings check_memory(const MemoryFacts& memory, const Need& need);
// open files; file size where it is limited.
Findings check_limits(const LimitFacts& limits, const Need& need);
// cpu, cpu quota, clock.
Findings check_cpu(const CpuFacts& cpu);

}  // namespace spillway::doctor
