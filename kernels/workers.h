// The compute threads: a oneTBB arena of a fixed size, apart from the host program's own arenas and from OpenMP. A limit that
// the program sets with tbb::global_control binds every arena of the process; a log line then says how many threads are left.
// parallel_for may be called from several threads at once and allocates nothing of its own. Bodies compute in the default
// floating-point environment (kernels/float_environment.h), whatever the host program set.
#pragma once

#include <memory>

#include "spillway/device.h"

namespace spillway {

// threads 0: one per core this process may use (sched_getaffinity, cgroup quota).
std::unique_ptr<HostWorkers> create_workers(unsigned threads);

}  // namespace spillway
