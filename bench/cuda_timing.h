// How long work on a stream takes by the GPU's own clock; for the benches of the trainer's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
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

// Microseconds that `run` takes on average after having run for `seconds` without a pause, over as long once more.
inline double sustained_us(cudaStream_t stream, double seconds, const std::function<cudaError_t()>& run) {
  constexpr int kBatch = 20;  // enough that the stream does not run dry while the host looks at the clock
  cudaEvent_t marks[2];
  for (cudaEvent_t& mark : marks) check(cudaEventCreateWithFlags(&mark, cudaEventDefault), "cudaEventCreateWithFlags");
  const auto batch = [&] {
    for (int i = 0; i < kBatch; ++i) check(run(), "what is measured");
  };
  // Two batches are under way: the earlier one's end is waited for when the later one has been enqueued.
  const auto run_for = [&](double wanted) {
    const auto begin = std::chrono::steady_clock::now();
    int batches = 0;
    std::chrono::duration<double> passed{};
    do {
      batch();
      check(cudaEventRecord(marks[batches % 2], stream), "cudaEventRecord");
      if (batches > 0) check(cudaEventSynchronize(marks[(batches - 1) % 2]), "cudaEventSynchronize");
      ++batches;
      passed = std::chrono::steady_clock::now() - begin;
    } while (passed.count() < wanted);
    return batches;
  };
  run_for(seconds);
  cudaEvent_t begin, end;
  check(cudaEventCreateWithFlags(&begin, cudaEventDefault), "cudaEventCreateWithFlags");
  check(cudaEventCreateWithFlags(&end, cudaEventDefault), "cudaEventCreateWithFlags");
  check(cudaEventRecord(begin, stream), "cudaEventRecord");
  const int batches = run_for(seconds);
  check(cudaEventRecord(end, stream), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  for (cudaEvent_t event : {marks[0], marks[1], begin, end}) check(cudaEventDestroy(event), "cudaEventDestroy");
  return 1e3 * ms / (batches * kBatch);
}

}  // namespace spillway::bench
