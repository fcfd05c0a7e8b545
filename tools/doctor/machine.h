// What this machine and the limits on this process are like, read from the kernel and tried with the library's own
// means; no root needed. Nothing here judges: machine_checks.h does.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "spillway/io_queue.h"

namespace spillway::doctor {

// Where the kernel shows itself; tests point these at directories of their own.
struct Roots {
  std::filesystem::path proc = "/proc", sys = "/sys", root = "/";
};

struct KernelInfo {
  std::string release = {};    // 6.1.0-18-amd64
  bool wsl = false;            // Windows Subsystem for Linux
  std::string container = {};  // docker, podman, kubernetes, lxc, …; empty: none that shows
  bool seccomp = false;        // a filter decides which system calls this process may make
};
KernelInfo kernel_info(const Roots& roots = {});

// A rung of the ladder of I/O engines, tried without a file.
struct RungInfo {
  IoEngineKind kind;
  std::string refused = {};  // why it is not to be had; empty: it is
};
struct RingInfo {
  std::vector<RungInfo> ladder = {};  // best first
  std::string granted = {};           // what io_uring says of itself; empty: refused
  std::string not_registered = {};    // why it takes no registered buffers
  int disabled = -1;                  // the sysctl kernel.io_uring_disabled; -1: this kernel has none
  // ulimit -l; nothing: there is no limit, or not for this process (CAP_IPC_LOCK).
  std::optional<std::uint64_t> lockable_bytes = {};
};
RingInfo ring_info(const Roots& roots = {});

struct MemoryInfo {
  std::uint64_t total_bytes = 0, available_bytes = 0, swap_bytes = 0, swap_used_bytes = 0;
  std::optional<std::uint64_t> cgroup_bytes = {};   // the tightest limit
  std::optional<std::uint64_t> cgroup_left = {};    // of the tightest one, what its processes have not taken
  std::optional<std::uint64_t> address_space = {};  // what ulimit -v leaves
  int overcommit = -1;                              // vm.overcommit_memory
  std::uint64_t commit_left_bytes = 0;              // counts with overcommit 2 only
  bool arena_tried = false;                         // else there was no address space for one
  std::string small_pages = {};                     // why an arena gets no huge pages; empty: it may
  std::optional<double> huge_share = {};            // of a touched arena, in huge pages
  std::uint64_t hugetlb_bytes = 0;                  // reserved in hugetlbfs, which Spillway does not use
};
MemoryInfo memory_info(const Roots& roots = {});

struct LimitInfo {
  std::optional<std::uint64_t> open_files = {}, file_bytes = {};  // ulimit -n, -f
};
LimitInfo limit_info();

struct CpuInfo {
  std::string target = {};           // the instruction set that the kernels run on: AVX3_DL, AVX2, NEON, …, scalar
  unsigned cpus = 0;                 // that this process may use
  std::optional<double> quota = {};  // CPUs' worth of time that the cgroup allows
  std::vector<unsigned> nodes = {};  // NUMA nodes, by the system's numbers
  std::string driver = {}, governor = {}, preference = {};  // of the clock, of the first CPU; empty: not shown
  std::uint64_t lowest_khz = 0, highest_khz = 0;            // that the governor may choose, and that the CPU has
};
CpuInfo cpu_info(const Roots& roots = {});

}  // namespace spillway::doctor
