// Every CUDA call is checked; private to kernels/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "spillway/error.h"

namespace spillway::cuda {

// A sticky error (an illegal address, a lost device) comes back from every later call, too: the run ends, and the store
// is at its last commit.
inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw Error(Code::kDevice, {"GPU", std::string(what) + " failed: " + cudaGetErrorString(result), 0,
                              "nvidia-smi and the kernel log say more; a store is at its last commit"});
}

}  // namespace spillway::cuda
