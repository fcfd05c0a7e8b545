// The emulated GPU behind CUDA's runtime and cuBLASLt: one device with memory of its own, and streams that run side by
// side. Private to tests/emulated_gpu.
//
// Work of different streams is ordered by events alone: each stream has a thread. Whatever computes or copies takes
// the device for itself, so kernels need no atomics. Only then can device memory be touched: a host thread that reads
// or writes it in between is stopped by a segmentation fault, as it is with a GPU.
//
// SPILLWAY_EMULATED_GPU_LOG names a file that gets a line for each call that may cost time: what was called, and
// `default stream` or `pageable` where that applies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace spillway::emulated {

inline constexpr std::size_t kMemoryBytes = std::size_t{8} << 30;
inline constexpr int kMajor = 9, kMinor = 0;

// The device, for as long as this lives.
class Device {
 public:
  Device();
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
};

bool in_device_memory(const void* data, std::size_t bytes);

// At the beginning of everything that a program calls. A host function in a stream may call none of it.
void enter(const char* call, const char* remark = "");
// As CUDA may do it: one at a time, whatever their streams.
void run_host_function(void (*function)(void*), void* argument);

// Runs after all that was enqueued before.
void enqueue(cudaStream_t stream, std::function<void()> work);

// For cudaGetLastError; returns it.
cudaError_t fail(cudaError_t error);

}  // namespace spillway::emulated
