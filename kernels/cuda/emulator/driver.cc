// Calls of CUDA's driver that are asked for by name: marks of streams in host memory, streams that wait for one, and
// the contexts of threads; and how the runtime chooses among several GPUs.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/runtime.h"

using namespace spillway::emulated;

namespace {

std::atomic_ref<std::uint32_t> mark_at(CUdeviceptr address) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address));
}

// Of this thread: the GPU that it has chosen, and the contexts in the place of that one's.
struct Chosen {
  int gpu = ::getpid() == ::gettid() ? set_to("SPILLWAY_EMULATED_GPU_CURRENT", 0) : 0;
  bool begun = false;  // with that GPU: the thread has its context
  std::vector<int> pushed;
};
Chosen& chosen() {
  thread_local Chosen the;
  return the;
}

CUcontext context_of(int gpu) { return reinterpret_cast<CUcontext>(std::uintptr_t(gpu) + 1); }

CUresult current_context(CUcontext* context) {
  *context = chosen().pushed.empty() && !chosen().begun ? nullptr : context_of(gpu_of_this_thread());
  return CUDA_SUCCESS;
}
CUresult current_device(CUdevice* device) { return *device = gpu_of_this_thread(), CUDA_SUCCESS; }
CUresult push_context(CUcontext context) {
  chosen().pushed.push_back(int(reinterpret_cast<std::uintptr_t>(context) - 1));
  return CUDA_SUCCESS;
}
CUresult pop_context(CUcontext* context) {
  *context = context_of(chosen().pushed.back());
  chosen().pushed.pop_back();
  return CUDA_SUCCESS;
}

CUresult write_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  if (!is_of_this_thread(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (enter("cuStreamWriteValue32") != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  enqueue(stream, [=] {
    if (!has_died()) mark_at(address).store(value, std::memory_order_release);
  });
  return CUDA_SUCCESS;
}

CUresult wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
  if (!is_of_this_thread(stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (enter("cuStreamWaitValue32") != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  enqueue(stream, [=] {
    const auto is_less = [&] {
      return static_cast<std::int32_t>(mark_at(address).load(std::memory_order_acquire) - value) < 0;
    };
    while (is_less() && !has_died()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& functions() {
  static const auto& all =
      *new std::map<std::string, void*>{{"cuStreamWriteValue32", reinterpret_cast<void*>(&write_value)},
                                        {"cuStreamWaitValue32", reinterpret_cast<void*>(&wait_value)},
                                        {"cuCtxGetCurrent", reinterpret_cast<void*>(&current_context)},
                                        {"cuCtxGetDevice", reinterpret_cast<void*>(&current_device)},
                                        {"cuCtxPushCurrent", reinterpret_cast<void*>(&push_context)},
                                        {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop_context)}};
  return all;
}

}  // namespace

namespace spillway::emulated {

int set_to(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

int gpu_of_this_thread() { return chosen().pushed.empty() ? chosen().gpu : chosen().pushed.back(); }

void begin_with_gpu() {
  static const int spared = set_to("SPILLWAY_EMULATED_GPU_SPARED", -1);
  if (gpu_of_this_thread() == spared) stop("a call is for a GPU that is to be spared");
  if (chosen().pushed.empty()) chosen().begun = true;
}

}  // namespace spillway::emulated

extern "C" cudaError_t cudaGetDeviceCount(int* count) {
  *count = std::max(set_to("SPILLWAY_EMULATED_GPUS", 1), set_to("SPILLWAY_EMULATED_GPU_CURRENT", 0) + 1);
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = gpu_of_this_thread(), cudaSuccess; }
extern "C" cudaError_t cudaSetDevice(int device) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (device < 0 || device >= count) return fail(cudaErrorInvalidDevice);
  chosen() = {.gpu = device, .begun = false, .pushed = {}};
  begin_with_gpu();
  return cudaSuccess;
}

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
  const auto asked = functions().find(name);
  *function = asked == functions().end() ? nullptr : asked->second;
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
