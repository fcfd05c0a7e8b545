// What is wrong with a machine: what was found of it in, findings out. Pure but for check_ranks().
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/doctor/finding.h"
#include "tools/doctor/gpu.h"
#include "tools/doctor/machine.h"
#include "tools/doctor/path.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/run_requirements.h"
#include "tools/drive/drive.h"

namespace spillway::doctor {

// The machine (machine_checks.cc)

// kernel; wsl and container where there is one.
Findings check_kernel(const KernelInfo& kernel, const RingInfo& ring);
// io_uring and, where it is to be had, memlock.
Findings check_ring(const RingInfo& ring, const KernelInfo& kernel, const RunRequirements& required);
// plan (of a model), memory, swap, overcommit, address space, huge pages.
Findings check_memory(const MemoryInfo& memory, const RunRequirements& required);
// open files; file size where it is limited.
Findings check_limits(const LimitInfo& limits, const RunRequirements& required);
// cpu, cpu quota, clock.
Findings check_cpu(const CpuInfo& cpu);

// GPUs (gpu_checks.cc)

// cuda, and with a GPU: whether a configuration uses it, link, toolkit, nccl.
Findings check_gpu(const GpuInfo& gpu, const KernelInfo& kernel);

// The NUMA node of the first GPU that has one.
std::optional<int> gpu_node(const GpuInfo& gpu);

// Directories for a store (path_checks.cc)

Findings check_path(const PathInfo& path, const RunRequirements& required);

// NUMA nodes by the system's numbers.
struct NodesInUse {
  std::optional<int> gpu = {};
  std::vector<unsigned> cpus = {};  // of those that this process may use
};

// What concerns all paths together: space for a store that is striped over them, two paths on one drive, drives on
// other NUMA nodes than those that use them.
Findings check_paths(std::span<const PathInfo> paths, const RunRequirements& required, const NodesInUse& nodes);

// GB/s of `8.0 GT/s × 4`, in one direction and after the line's code; nothing when it is not such a text.
std::optional<double> link_gb_per_s(const std::string& link);

// What the rates of a trial say (probe_check.cc): status, seen, slower_by and repair. `mount_point` as a shell takes
// it.
Finding judge_probe(const ProbeInfo& probe, const drive::DriveInfo& drive, const std::string& mount_point);

// File systems that are no place for a store, and those that cost something (file_system.cc): status, seen, slower_by
// and repair.
Finding judge_file_system(const drive::MountInfo& mount);

// What the ranks that a launcher has started do together (ranks_checks.cc). Every rank calls it; the first one gets the
// findings. Throws what ends a communicator.
Findings check_ranks();

}  // namespace spillway::doctor
