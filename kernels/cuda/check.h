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
  const char* hint =
      result == cudaErrorMemoryAllocation
          ? "lower spillway.hbm_bytes: CUDA loads kernels at first use, outside this budget; a store is at "
            "its last commit"
          : "nvidia-smi and the kernel log say more; a store is at its last commit";
  throw Error(Code::kDevice, {"GPU", std::string(what) + " failed: " + cudaGetErrorString(result), 0, hint});
}

// While it lives, this thread may ask how far the GPU is: in CUDA's usual mode that breaks the capture of a CUDA graph
// in any other thread.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What cudaEventQuery and cudaStreamQuery answered. "Not yet" counts as an error, too, for whoever asks for the last
// one next: for the launch of a kernel.
inline bool is_done(cudaError_t state) {
  if (state == cudaErrorNotReady) return static_cast<void>(cudaGetLastError()), false;
  check(state, "work on the GPU");
  return true;
}

}  // namespace spillway::cuda
