// The compute threads: oneTBB arenas of a fixed size, apart from the host program's own arenas and from OpenMP. A
// limit that the program sets with tbb::global_control binds every arena of the process; a log line then says how many
// threads are left. parallel_for may be called from several threads at once and allocates nothing of its own. Bodies
// compute in the default floating-point environment (kernels/float_environment.h), whatever the host program set.
//
// With one share no thread is bound. With several there is an arena for each, and whichever thread runs a body of it,
// a caller's too, is bound to the node's CPUs while it does, and not a moment longer.
#pragma once

#include <memory>
#include <span>

#include "kernels/thread_shares.h"
#include "spillway/device.h"

namespace spillway {

// As share_threads() gives them: at least one, and of several each with two threads or more.
std::unique_ptr<HostWorkers> create_workers(std::span<const ThreadShare> shares);

// threads 0: one per physical core this process may use (affinity mask, cgroup quota).
std::unique_ptr<HostWorkers> create_workers(unsigned threads);

}  // namespace spillway
