// Memory of the device and of the host, copies, launches, and what the runtime tells about the device.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/emulator/blocks.h"
#include "kernels/cuda/emulator/device_code.h"
#include "kernels/cuda/emulator/runtime.h"

namespace spillway::emulated {
namespace {

constexpr std::size_t kPage = 4096, kHugePage = 2 << 20;
constexpr std::size_t kSharedBytesUnasked = 48 << 10;
constexpr int kPoison = 0xff;  // fresh memory holds anything; this is a NaN in every type

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

struct Memory {
  std::mutex device;  // held by who computes or copies
  std::mutex tables;
  std::map<std::uintptr_t, std::size_t> allocated, registered;  // bytes by address; registered: whole pages
  std::map<int, std::size_t> used;                              // by device
  std::map<std::uintptr_t, int> device_of;                      // that memory was allocated on
  std::map<const void*, std::size_t> shared_bytes;              // that kernels may ask for
};
Memory& memory() {
  static auto& the = *new Memory;  // stream threads may outlive static objects
  return the;
}

// Opens the device's memory for as long as it lives.
class Device {
 public:
  Device() {
    memory().device.lock();
    protect(PROT_READ | PROT_WRITE);
  }
  ~Device() {
    protect(PROT_NONE);
    memory().device.unlock();
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

 private:
  static void protect(int how);
};

void Device::protect(int how) {
  const std::lock_guard lock(memory().tables);
  for (const auto& [address, bytes] : memory().allocated) {
    if (::mprotect(reinterpret_cast<void*>(address), round_up(bytes, kHugePage), how) != 0) stop("mprotect failed");
  }
}

bool within(const std::map<std::uintptr_t, std::size_t>& ranges, const void* data, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return false;
  const auto& [begin, size] = *--after;
  return at + bytes <= begin + size;
}
bool is_registered(const void* data, std::size_t bytes) {
  const std::lock_guard lock(memory().tables);
  return within(memory().registered, data, bytes);
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local bool in_host_function = false;
std::atomic<bool> dead = false;

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const bool to_device = in_device_memory(to, bytes), from_device = in_device_memory(from, bytes);
  const bool fits = kind == cudaMemcpyHostToDevice     ? to_device && !from_device
                    : kind == cudaMemcpyDeviceToHost   ? !to_device && from_device
                    : kind == cudaMemcpyDeviceToDevice ? to_device && from_device
                                                       : kind == cudaMemcpyDefault;
  if (!fits) return fail(cudaErrorInvalidValue);
  const bool pinned = (to_device || is_registered(to, bytes)) && (from_device || is_registered(from, bytes));
  if (const cudaError_t died =
          enter(stream == nullptr ? "copy on the default stream" : "copy", pinned ? "" : "pageable"))
    return died;
  enqueue_on_device(stream, [=] { std::memcpy(to, from, bytes); });
  return pinned ? cudaSuccess : cudaStreamSynchronize(stream);
}

cudaError_t fill(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (!in_device_memory(to, bytes)) return fail(cudaErrorInvalidValue);
  if (!is_of_this_thread(stream)) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t died = enter(stream == nullptr ? "fill on the default stream" : "fill")) return died;
  enqueue_on_device(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

std::size_t memory_bytes() { return std::size_t(set_to("SPILLWAY_EMULATED_GPU_MIB", kMemoryMib)) << 20; }
int capability(int device) {
  return device == set_to("SPILLWAY_EMULATED_GPU_OLD", -1) ? 75 : set_to("SPILLWAY_EMULATED_GPU_SM", 90);
}

}  // namespace

bool in_device_memory(const void* data, std::size_t bytes) {
  const std::lock_guard lock(memory().tables);
  return within(memory().allocated, data, bytes);
}

cudaError_t enter(const char* call, const char* remark) {
  if (in_host_function) stop("a host function in a stream calls CUDA");
  begin_with_gpu();
  static std::FILE* const file = [] {
    const char* path = std::getenv("SPILLWAY_EMULATED_GPU_LOG");
    return path == nullptr ? nullptr : std::fopen(path, "ae");
  }();
  static const std::uint64_t dies_at = [] {
    const char* number = std::getenv("SPILLWAY_EMULATED_GPU_DIES_AT");
    return number == nullptr ? UINT64_MAX : std::strtoull(number, nullptr, 10);
  }();
  static std::atomic<std::uint64_t> calls = 0;
  if (file != nullptr) {
    std::fprintf(file, "%s%s%s\n", call, *remark == 0 ? "" : " ", remark);
    std::fflush(file);
  }
  if (++calls == dies_at) {
    const std::lock_guard lock(memory().device);  // what runs comes to its end
    dead = true;
  }
  return dead ? fail(cudaErrorIllegalAddress) : cudaSuccess;
}

void enqueue_on_device(cudaStream_t stream, std::function<void()> work) {
  enqueue(stream, [work = std::move(work)] { on_device(work); });
}

void on_device(const std::function<void()>& work) {
  const Device device;
  if (!dead) work();
}

bool has_died() { return dead; }

void enqueue_host_function(cudaStream_t stream, void (*function)(void*), void* argument) {
  enqueue(stream, [=] {
    static auto& one = *new std::mutex;
    const std::lock_guard lock(one);
    if (dead) return;
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t enqueue_grid(dim3 blocks, dim3 threads, std::size_t shared_bytes, cudaStream_t stream, const void* kernel,
                         std::function<void()> thread) {
  const auto is = [](dim3 size, std::uint64_t x, std::uint64_t y, std::uint64_t z) {
    return size.x > 0 && size.y > 0 && size.z > 0 && size.x <= x && size.y <= y && size.z <= z;
  };
  if (!is(blocks, 0x7fffffff, 65535, 65535) || !is(threads, 1024, 1024, 64) ||
      std::uint64_t{threads.x} * threads.y * threads.z > 1024) {
    return fail(cudaErrorInvalidConfiguration);
  }
  {
    const std::lock_guard lock(memory().tables);
    const auto asked = memory().shared_bytes.find(kernel);
    const std::size_t most = asked == memory().shared_bytes.end() ? kSharedBytesUnasked : asked->second;
    if (shared_bytes > most) return fail(cudaErrorInvalidValue);
  }
  if (!is_of_this_thread(stream)) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t died = enter(stream == nullptr ? "launch on the default stream" : "launch")) return died;
  enqueue_on_device(stream, [=, thread = std::move(thread)] { run_grid({blocks, threads, shared_bytes}, thread); });
  return cudaSuccess;
}

}  // namespace spillway::emulated

using namespace spillway::emulated;

extern "C" {

cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  if (const cudaError_t died = enter("cudaMalloc")) return died;
  const std::lock_guard device(memory().device);  // fresh memory is not touched by who has the device
  const std::lock_guard lock(memory().tables);
  *to = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::size_t& used = memory().used[gpu_of_this_thread()];
  if (bytes > memory_bytes() - used) return fail(cudaErrorMemoryAllocation);
  const std::size_t mapped = round_up(bytes, kHugePage);
  void* all = ::mmap(nullptr, mapped + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  auto* begin = reinterpret_cast<void*>(round_up(reinterpret_cast<std::uintptr_t>(all), kHugePage));
  ::madvise(begin, mapped, MADV_HUGEPAGE);
  if (::mprotect(begin, mapped, PROT_READ | PROT_WRITE) != 0) stop("mprotect failed");
  std::memset(begin, kPoison, bytes);
  if (::mprotect(begin, mapped, PROT_NONE) != 0) stop("mprotect failed");
  memory().allocated[reinterpret_cast<std::uintptr_t>(begin)] = bytes;
  memory().device_of[reinterpret_cast<std::uintptr_t>(begin)] = gpu_of_this_thread();
  used += bytes;
  *to = begin;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (const cudaError_t died = enter("cudaFree")) return died;
  if (data == nullptr) return cudaSuccess;
  cudaDeviceSynchronize();
  const std::lock_guard device(memory().device);
  const std::lock_guard lock(memory().tables);
  const auto found = memory().allocated.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == memory().allocated.end()) return fail(cudaErrorInvalidValue);
  memory().used[memory().device_of.at(found->first)] -= found->second;
  ::munmap(data, round_up(found->second, kHugePage));
  memory().allocated.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* left, std::size_t* all) {
  const std::lock_guard lock(memory().tables);
  *left = memory_bytes() - memory().used[gpu_of_this_thread()];
  *all = memory_bytes();
  return cudaSuccess;
}

// Whole pages are pinned, and none of them twice.
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  if (const cudaError_t died = enter("cudaHostRegister")) return died;
  if (data == nullptr || bytes == 0) return fail(cudaErrorInvalidValue);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = at / kPage * kPage, end = round_up(at + bytes, kPage);
  const std::lock_guard lock(memory().tables);
  const auto after = memory().registered.lower_bound(end);
  if (after != memory().registered.begin()) {
    const auto& [before, size] = *std::prev(after);
    if (before + size > begin) return fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  memory().registered[begin] = end - begin;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** to, std::size_t bytes, unsigned) {
  if (const cudaError_t died = enter("cudaHostAlloc")) return died;
  *to = std::aligned_alloc(kPage, round_up(bytes, kPage));
  return *to == nullptr ? fail(cudaErrorMemoryAllocation) : cudaHostRegister(*to, bytes, 0);
}
cudaError_t cudaFreeHost(void* data) {
  if (const cudaError_t died = enter("cudaFreeHost")) return died;
  cudaDeviceSynchronize();
  const cudaError_t unregistered = cudaHostUnregister(data);
  std::free(data);
  return unregistered;
}

cudaError_t cudaHostUnregister(void* data) {
  if (const cudaError_t died = enter("cudaHostUnregister")) return died;
  const std::lock_guard lock(memory().tables);
  const std::size_t erased = memory().registered.erase(reinterpret_cast<std::uintptr_t>(data) / kPage * kPage);
  return erased == 1 ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t result = copy(to, from, bytes, kind, nullptr);
  return result == cudaSuccess ? cudaStreamSynchronize(nullptr) : result;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return fill(to, value, bytes, nullptr); }

// Grids run one after the other here, so that nothing is gained by an early launch.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return fail(cudaErrorInvalidValue);
  if (value < 0 || static_cast<std::size_t>(value) > kMostSharedBytes) return fail(cudaErrorInvalidValue);
  const std::lock_guard lock(memory().tables);
  memory().shared_bytes[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    default: return "an error that the emulated GPU does not have";
  }
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (device < 0 || device >= count) return fail(cudaErrorInvalidValue);
  if (attribute == cudaDevAttrComputeCapabilityMajor) return *value = capability(device) / 10, cudaSuccess;
  if (attribute == cudaDevAttrComputeCapabilityMinor) return *value = capability(device) % 10, cudaSuccess;
  return fail(cudaErrorInvalidValue);
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (device < 0 || device >= count) return fail(cudaErrorInvalidValue);
  *properties = {};
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // of a process that sees one alone: which
  const std::string id = std::to_string(device) + " of " + (visible ? visible : "all");
  id.copy(properties->uuid.bytes, sizeof properties->uuid.bytes);
  std::snprintf(properties->name, sizeof properties->name, "emulated GPU");
  properties->major = capability(device) / 10;
  properties->minor = capability(device) % 10;
  properties->totalGlobalMem = memory_bytes();
  return cudaSuccess;
}

}  // extern "C"
