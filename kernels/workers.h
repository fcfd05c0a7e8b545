// The compute threads: a oneTBB arena of a fixed size. A host program's own TBB or OpenMP settings are neither read nor
// disturbed. parallel_for may be called from several threads at once and allocates nothing of its own.
#pragma once

#include <memory>

#include "spillway/device.h"

namespace spillway {

// threads 0: one per core this process may use (sched_getaffinity, cgroup quota).
std::unique_ptr<HostWorkers> create_workers(unsigned threads);

}  // namespace spillway
