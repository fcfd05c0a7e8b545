#include "kernels/cuda/emulator/blocks.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/emulator/device_code.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace spillway::emulated {

Thread threads[kMostThreads];
unsigned current_thread = 0;
unsigned char* dynamic_shared_memory = nullptr;

namespace {

constexpr std::size_t kStackBytes = 256 << 10, kGuardBytes = 1024;
constexpr unsigned char kPoison = 0xff;  // a NaN in every type

// GCC's own setjmp saves three words and no signal mask: a switch is a few instructions.
using JumpBuffer = void* [5];

// A CUDA thread that comes by, and goes on with the next one's when that is over.
struct Fiber {
  std::unique_ptr<std::byte[]> stack;
  JumpBuffer at;
};
Fiber fibers[kMostThreads];
JumpBuffer scheduler;
ucontext_t scheduler_context;
const std::function<void()>* thread_code = nullptr;
std::minstd_rand order;

[[noreturn, gnu::noinline]] void go_to(JumpBuffer& place) { __builtin_longjmp(place, 1); }

// To the next lane of the warp that can go on, or back to who asked the warp to run.
[[noreturn, gnu::noinline]] void go_on(unsigned from) {
  for (unsigned t = from; t % kWarp != 0 || t == from; ++t) {
    if (t >= kMostThreads || threads[t].state != ThreadState::kReady) {
      if ((t + 1) % kWarp == 0) break;
      continue;
    }
    current_thread = t;
    threadIdx = threads[t].index;
    go_to(fibers[t].at);
  }
  go_to(scheduler);
}

[[gnu::noinline]] void leave(ThreadState state) {
  const unsigned self = current_thread;
  threads[self].state = state;
  if (__builtin_setjmp(fibers[self].at) != 0) return;
  if ((self + 1) % kWarp == 0) go_to(scheduler);
  go_on(self + 1);
}

// The stacks are made by makecontext, which is slow.
void live() {
  const unsigned self = current_thread;
  if (__builtin_setjmp(fibers[self].at) == 0) setcontext(&scheduler_context);
  while (true) {
    (*thread_code)();
    leave(ThreadState::kDone);
  }
}

void make_fiber(unsigned thread) {
  if (fibers[thread].stack) return;
  fibers[thread].stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibers[thread].stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &live, 0);
  current_thread = thread;
  swapcontext(&scheduler_context, &context);
}

[[gnu::noinline]] void run_ready(unsigned begin) {
  if (__builtin_setjmp(scheduler) == 0) go_on(begin);
}

// Opens a barrier for threads [begin, end), all of which must be at it or, none of them being there, past it.
void release(unsigned begin, unsigned end, ThreadState barrier, const char* complaint) {
  unsigned waiting = 0;
  for (unsigned t = begin; t < end; ++t) waiting += threads[t].state == barrier;
  if (waiting != 0 && waiting != end - begin) stop(complaint);
  for (unsigned t = begin; t < end && waiting != 0; ++t) threads[t].state = ThreadState::kReady;
}

// Until none of its threads can go on before the block's barrier. Says whether any is at it.
bool run_warp(unsigned begin, unsigned end) {
  const auto any_is = [&](ThreadState state) {
    for (unsigned t = begin; t < end; ++t) {
      if (threads[t].state == state) return true;
    }
    return false;
  };
  while (any_is(ThreadState::kReady)) {
    run_ready(begin);
    release(begin, end, ThreadState::kAtWarpBarrier,
            "some lanes of a warp never come to where the others exchange values");
  }
  return any_is(ThreadState::kAtBlockBarrier);
}

void run_block(unsigned count, std::size_t shared_bytes) {
  std::memset(dynamic_shared_memory, kPoison, shared_bytes + kGuardBytes);
  for (unsigned t = 0; t < count; ++t) {
    threads[t].state = ThreadState::kReady;
    threads[t].odd_turn = false;
  }
  std::vector<unsigned> warps((count + kWarp - 1) / kWarp);
  std::iota(warps.begin(), warps.end(), 0u);
  for (bool waiting = true; waiting;) {
    waiting = false;
    std::shuffle(warps.begin(), warps.end(), order);
    for (const unsigned warp : warps) waiting |= run_warp(warp * kWarp, std::min((warp + 1) * kWarp, count));
    release(0, count, ThreadState::kAtBlockBarrier, "some threads of a block never come to a barrier of the others");
  }
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    if (dynamic_shared_memory[shared_bytes + i] != kPoison) stop("dynamic shared memory is written beyond its end");
  }
}

}  // namespace

void run_grid(const Grid& grid, const std::function<void()>& thread) {
  alignas(1024) static unsigned char shared_memory[kMostSharedBytes + kGuardBytes];
  dynamic_shared_memory = shared_memory;
  thread_code = &thread;
  blockDim = grid.threads;
  gridDim = grid.blocks;
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned t = 0; t < count; ++t) {
    make_fiber(t);
    threads[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
  }
  for (unsigned t = count; t < kMostThreads; ++t) threads[t].state = ThreadState::kDone;
  std::vector<unsigned> blocks(gridDim.x * gridDim.y * gridDim.z);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), order);
  for (const unsigned b : blocks) {
    blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
    run_block(count, grid.shared_bytes);
  }
}

void block_barrier() { leave(ThreadState::kAtBlockBarrier); }
void warp_barrier() { leave(ThreadState::kAtWarpBarrier); }

void stop(const char* why) {
  std::fprintf(stderr, "emulated GPU: %s\n", why);
  std::abort();
}

}  // namespace spillway::emulated
