// Every CUDA call is checked; private to tools/models/ops/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "spillway/error.h"

namespace spillway::models {

inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw Error(Code::kDevice, {.object = "GPU",
                              .happened = std::string(what) + " failed: " + cudaGetErrorString(result),
                              .errno_value = 0,
                              .hint = "nvidia-smi and the kernel log say more; a store is at its last commit"});
}

}  // namespace spillway::models
