// Kernels that follow one another on a stream without a pause: the next one's blocks are brought onto the GPU while the
// last ones of the kernel before still run, and wait there for its end. A tile's update takes some 40 us on an H100,
// of which a start of its own would be 2.
#pragma once

#include "kernels/cuda/check.h"

namespace spillway::cuda {

// First in a kernel that launch_following() launches: everything before it on the stream has ended when it returns.
__device__ inline void follow_on() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// Only code for compute capability 9.0 and later waits in follow_on(): what was compiled from older PTX must not be
// launched early.
inline bool can_follow(const void* kernel) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "asking for a kernel");
  return attributes.ptxVersion >= 90;
}

// A kernel of one-dimensional blocks without dynamic shared memory. `what`: in errors.
template <typename... Parameters, typename... Arguments>
void launch_following(const char* what, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                      cudaStream_t stream, const Arguments&... arguments) {
  static const bool can = can_follow(reinterpret_cast<const void*>(kernel));  // a room's kernels are compiled alike
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = blocks;
  how.blockDim = threads;
  how.stream = stream;
  how.attrs = &attribute;
  how.numAttrs = can ? 1 : 0;
  check(cudaLaunchKernelEx(&how, kernel, arguments...), what);
}

}  // namespace spillway::cuda
