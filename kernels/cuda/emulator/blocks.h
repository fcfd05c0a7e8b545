// A grid of CUDA threads on the CPU: block after block, each thread of a block a fiber that runs until a barrier.
//
// Blocks, and the warps of a block, run in an order that is different in every launch, so that a result which depends
// on it shows. What the hardware leaves undefined stops the program with a message: a barrier that some threads of the
// block (of the warp) never come to, and dynamic shared memory that is written past its end.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace spillway::emulated {

inline constexpr std::size_t kMostSharedBytes = 99 << 10;  // of a block, on sm_86 and sm_89, which have the least

struct Grid {
  dim3 blocks, threads;
  std::size_t shared_bytes;
};

// One at a time; the caller sees to that.
void run_grid(const Grid& grid, const std::function<void()>& thread);

[[noreturn]] void stop(const char* why);

}  // namespace spillway::emulated
