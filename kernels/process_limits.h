// What this process may use of the machine: cores (its affinity mask, cut down by the CPU quota of its cgroup and those
// above it) and memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace spillway {

// Where the kernel shows cgroups; tests point these at directories of their own.
struct CgroupFiles {
  std::filesystem::path membership = "/proc/self/cgroup";
  std::filesystem::path root = "/sys/fs/cgroup";
};

// The tightest CPU quota in cores (2.5 for 250 ms of CPU time in every 100 ms), v1 or v2; nothing when there is none.
std::optional<double> cpu_quota(const CgroupFiles& files = {});

// The tightest memory limit in bytes, v1 or v2; nothing when there is none.
std::optional<std::uint64_t> memory_limit(const CgroupFiles& files = {});

// At least 1. A quota that is no whole number is rounded down: one thread too many makes the kernel stop all of them
// for the rest of each period.
unsigned usable_cores();

}  // namespace spillway
