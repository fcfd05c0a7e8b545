// The emulated GPU behind CUDA's runtime and cuBLASLt: a device with memory of its own, and streams that run side by
// side; or several, SPILLWAY_EMULATED_GPUS. Private to kernels/cuda/emulator.
//
// Work of different streams is ordered by events alone: each stream has a thread. Whatever computes or copies has the
// device for itself, so kernels need no atomics. Only then can device memory be touched: a thread of the host that
// reads or writes it in between is stopped by a segmentation fault, as it is with a GPU.
//
// Which of several a call is for, the thread's context says, as with CUDA: a kernel, a fill, an event or a mark on a
// stream of another one is refused. They compute one at a time.
//
// SPILLWAY_EMULATED_GPU_SM is its compute capability, 90 unless it is set; SPILLWAY_EMULATED_GPU_OLD a device of 75
// whatever the others have, SPILLWAY_EMULATED_GPU_CURRENT the one that the first thread has chosen, 0 unless it is set,
// SPILLWAY_EMULATED_GPU_SPARED one that no thread may call anything of, since that would take memory there.
// SPILLWAY_EMULATED_GPU_MIB is the memory of each, 8192 unless it is set.
// SPILLWAY_EMULATED_GPU_DIES_AT is the number of the call from which on every one fails, and nothing that is enqueued
// runs any more, as when a GPU falls off the bus.
// SPILLWAY_EMULATED_GPU_LOG names a file that gets a line for each call that may cost time: what was called, and
// `default stream` or `pageable` where that applies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace spillway::emulated {

inline constexpr int kMemoryMib = 8 * 1024;

bool in_device_memory(const void* data, std::size_t bytes);

int set_to(const char* variable, int otherwise);  // in the environment

// The GPU of the thread's context, or of the one that its next call makes.
int gpu_of_this_thread();
bool is_of_this_thread(cudaStream_t stream);  // its GPU
void begin_with_gpu();                        // by a call: a thread without a context gets that GPU's

// At the beginning of everything that a program calls: what it is to return in place of doing its work, unless that is
// cudaSuccess. Host functions in streams must call nothing of CUDA's.
cudaError_t enter(const char* call, const char* remark = "");

// Run after all that was enqueued before: work of the host, that always runs; work of the device, which it has for
// itself meanwhile; a function of the program's, one at a time, as CUDA may do it.
void enqueue(cudaStream_t stream, std::function<void()> work);
void enqueue_on_device(cudaStream_t stream, std::function<void()> work);
void enqueue_host_function(cudaStream_t stream, void (*function)(void*), void* argument);

// Runs it now, with the device for itself. Once the device has died, nothing.
void on_device(const std::function<void()>& work);
bool has_died();

// For cudaGetLastError; returns it.
cudaError_t fail(cudaError_t error);

}  // namespace spillway::emulated
