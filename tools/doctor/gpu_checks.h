// Facts of GPUs in, findings out. Pure.
#pragma once

#include <optional>

#include "tools/doctor/finding.h"
#include "tools/doctor/gpu.h"
#include "tools/doctor/machine.h"

namespace spillway::doctor {

// cuda, and with a GPU: whether a configuration uses it, link, toolkit, nccl.
Findings check_gpu(const GpuFacts& gpu, const KernelFacts& kernel);

// The NUMA node of the first GPU that has one.
std::optional<int> gpu_node(const GpuFacts& gpu);

}  // namespace spillway::doctor
