// What this process may use of the machine: CPUs (its affinity mask), CPU time and memory (the limits of its cgroup and
// those above it, and its own).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "spillway/units.h"

namespace spillway {

// What this process takes beside its arenas, at most: code, libraries, stacks of threads, generated code.
inline constexpr std::uint64_t kOutsideArenas = 200 * kMiB;
// Of that, what a run takes on after the check of its memory, at least: a run that had 6 MiB was seen to end.
inline constexpr std::uint64_t kLeastOutside = 16 * kMiB;

// Where the kernel shows cgroups; tests point these at directories of their own.
struct CgroupFiles {
  std::filesystem::path membership = "/proc/self/cgroup";
  std::filesystem::path root = "/sys/fs/cgroup";
};

// The tightest CPU quota in cores (2.5 for 250 ms of CPU time in every 100 ms), v1 or v2; nothing when there is none.
std::optional<double> cpu_quota(const CgroupFiles& files = {});

// The tightest memory limit in bytes, v1 or v2; nothing when there is none.
std::optional<std::uint64_t> memory_limit(const CgroupFiles& files = {});

// What the tightest of these limits leaves: of each, what its group's processes have not taken yet. What they have in
// the page cache the kernel takes back. Nothing when there is no limit.
std::optional<std::uint64_t> memory_left(const CgroupFiles& files = {});

// Of the machine's RAM what new work could have: /proc/meminfo's MemAvailable.
std::uint64_t available_memory();

// What `ulimit -v` (RLIMIT_AS) leaves of the address space; nothing when there is no such limit.
std::optional<std::uint64_t> address_space_left();

// The affinity mask of the calling thread, which is the process's unless a thread was bound on purpose. At least one,
// ascending.
std::vector<unsigned> affinity_cpus();

}  // namespace spillway
