// How long work on a stream takes by the GPU's own clock; for the benches of the trainer's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace spillway::bench {

// Ends the program where CUDA refuses something.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Microseconds between events around `run`, which enqueues; the median of 20 after 3 that do not count.
inline double median_us(cudaStream_t stream, const std::function<cudaError_t()>& run) {
  constexpr int kWarmUps = 3, kRuns = 20;
  cudaEvent_t begin, end;
  check(cudaEventCreateWithFlags(&begin, cudaEventDefault), "cudaEventCreateWithFlags");
  check(cudaEventCreateWithFlags(&end, cudaEventDefault), "cudaEventCreateWithFlags");
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kRuns; ++i) {
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    check(run(), "what is measured");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= kWarmUps) times.push_back(1e3 * ms);
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return (times[kRuns / 2 - 1] + times[kRuns / 2]) / 2;
}

}  // namespace spillway::bench
