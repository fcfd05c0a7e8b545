// Kernels that follow one another on a stream without a pause: the next one's blocks are brought onto the GPU while the
// last ones of the kernel before still run, and wait there for its end. A tile's update takes some 40 us on an H100,
// of which a start of its own would be 2.
#pragma once

#include "kernels/cuda/check.h"

namespace spillway::cuda {

// First in a kernel that launch_following() launches: everything before it on the stream has ended behind this line.
__device__ inline void follow_on() {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
}

// GPUs before compute capability 9.0 know no such launch.
inline bool can_follow() {
  static const bool can = [] {
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "asking for the device");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device");
    return major >= 9;
  }();
  return can;
}

// A kernel of one-dimensional blocks without dynamic shared memory. `what`: in errors.
template <typename... Parameters, typename... Arguments>
void launch_following(const char* what, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                      cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = blocks;
  how.blockDim = threads;
  how.stream = stream;
  how.attrs = &attribute;
  how.numAttrs = can_follow() ? 1 : 0;
  check(cudaLaunchKernelEx(&how, kernel, arguments...), what);
}

}  // namespace spillway::cuda
