// What CUDA's compiler adds to C++, for code that translate.py has made of a .cu file: included before all of it.
// Threads of a block are fibers of one thread of the CPU (blocks.h), so plain variables do for shared memory, and plain
// operations for atomic ones.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __align__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

using std::isfinite;
using std::max;
using std::min;

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace spillway::emulated {

inline constexpr unsigned kWarp = 32, kMostThreads = 1024;

enum class ThreadState : std::uint8_t { kReady, kAtWarpBarrier, kAtBlockBarrier, kDone };

// What a thread hands to the other lanes of its warp at the next barrier.
struct alignas(16) Mailbox {
  std::byte bytes[32];
};

struct Thread {
  uint3 index;
  ThreadState state = ThreadState::kDone;
  // Mailboxes are taken in turn: who writes into one knows that all have read what was in it, for they came to a
  // barrier since.
  bool odd_turn = false;
  Mailbox mailboxes[2];
};
extern Thread threads[kMostThreads];
extern unsigned current_thread;
extern unsigned char* dynamic_shared_memory;

void block_barrier();
void warp_barrier();
inline unsigned lane() { return current_thread % kWarp; }
inline unsigned char* dynamic_shared() { return dynamic_shared_memory; }

// What use(of) returns, where of(lane) is the `value` of a lane of the warp.
template <typename Value, typename Use>
auto exchange(const Value& value, Use use) {
  static_assert(sizeof(Value) <= sizeof(Mailbox) && std::is_trivially_copyable_v<Value>);
  Thread& own = threads[current_thread];
  const bool odd = own.odd_turn = !own.odd_turn;
  std::memcpy(&own.mailboxes[odd], &value, sizeof value);
  warp_barrier();
  const Thread* warp = &threads[current_thread / kWarp * kWarp];
  return use([odd, warp](unsigned of_lane) {
    Value theirs;
    std::memcpy(&theirs, &warp[of_lane].mailboxes[odd], sizeof theirs);
    return theirs;
  });
}

cudaError_t enqueue_grid(dim3 blocks, dim3 threads, std::size_t shared_bytes, cudaStream_t stream, const void* kernel,
                         std::function<void()> thread);

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments)
template <typename... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  dim3 blocks, threads;
  std::size_t shared_bytes;
  cudaStream_t stream;

  cudaError_t operator()(Parameters... arguments) const {
    return enqueue_grid(blocks, threads, shared_bytes, stream, reinterpret_cast<const void*>(kernel),
                        [kernel = kernel, arguments...] { kernel(arguments...); });
  }
};
template <typename... Parameters>
Launch(void (*)(Parameters...), dim3, dim3, std::size_t, cudaStream_t) -> Launch<Parameters...>;

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* how, void (*kernel)(Parameters...), Arguments&&... arguments) {
  return Launch<Parameters...>{kernel, how->gridDim, how->blockDim, how->dynamicSmemBytes,
                               how->stream}(std::forward<Arguments>(arguments)...);
}

}  // namespace spillway::emulated

#define cudaLaunchKernelEx ::spillway::emulated::launch_kernel

// Intrinsic functions, in CUDA's own names and types.
inline void __syncthreads() { spillway::emulated::block_barrier(); }
inline void __syncwarp() { spillway::emulated::warp_barrier(); }
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return spillway::emulated::exchange(value, [&](auto of) { return of(spillway::emulated::lane() ^ mask); });
}
template <typename Value>
Value __shfl_down_sync(unsigned, Value value, unsigned by, unsigned width) {
  const unsigned lane = spillway::emulated::lane();
  const unsigned from = lane % width + by < width ? lane + by : lane;
  return spillway::emulated::exchange(value, [&](auto of) { return of(from); });
}
template <typename Value>
Value __shfl_sync(unsigned, Value value, int from) {
  return spillway::emulated::exchange(value, [&](auto of) { return of(static_cast<unsigned>(from) % 32); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return spillway::emulated::exchange(value, [](auto of) {
    unsigned all = 0;
    for (unsigned l = 0; l < 32; ++l) all |= static_cast<unsigned>(of(l)) << l;
    return all;
  });
}
inline int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned long long atomicMin(unsigned long long* to, unsigned long long value) {
  return std::exchange(*to, std::min(*to, value));
}
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
