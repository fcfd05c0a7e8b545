// What the emulated GPU takes as CUDA does, and what it stops at.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace spillway::emulated {
namespace {

__global__ void sum_over_block(const int* from, int* to) {
  extern __shared__ __align__(16) unsigned char shared[];
  int* sums = reinterpret_cast<int*>(shared);
  int x = from[blockIdx.x * blockDim.x + threadIdx.x];
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / 32; ++w) x += sums[w];
  to[blockIdx.x] = x;
}
__global__ void leave_before_barrier(int) {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
__global__ void leave_before_exchange(int) {
  if (threadIdx.x == 40) return;
  __any_sync(0xffffffffu, true);
}
__global__ void write_behind_shared(unsigned bytes) {
  extern __shared__ unsigned char shared[];
  if (threadIdx.x == 0) shared[bytes] = 1;
}
__global__ void nothing(int) {}

class Emulation : public testing::Test {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    ASSERT_EQ(cudaMalloc(&device_, kBytes), cudaSuccess);
    ASSERT_EQ(cudaHostRegister(host_.data(), kBytes, 0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    cudaStreamDestroy(stream_);
    cudaHostUnregister(host_.data());
    cudaFree(device_);
  }
  static constexpr std::size_t kBytes = 64 << 10;
  int* ints() { return static_cast<int*>(device_); }

  std::vector<char> host_ = std::vector<char>(kBytes);
  void* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(Emulation, ThreadsOfABlockMeetAtBarriersAndExchangeValues) {
  auto* host = reinterpret_cast<int*>(host_.data());
  std::iota(host, host + 3 * 128, 0);
  ASSERT_EQ(cudaMemcpyAsync(device_, host, 3 * 128 * sizeof(int), cudaMemcpyHostToDevice, stream_), cudaSuccess);
  sum_over_block<<<3, 128, 4 * sizeof(int), stream_>>>(ints(), ints() + 1024);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(host, ints() + 1024, 3 * sizeof(int), cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (int b = 0; b < 3; ++b) EXPECT_EQ(host[b], 128 * (128 * b) + 127 * 128 / 2);
}

TEST_F(Emulation, WhatCudaRefusesIsRefused) {
  nothing<<<0, 32, 0, stream_>>>(0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  nothing<<<1, 2048, 0, stream_>>>(0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  nothing<<<1, 32, 64 << 10, stream_>>>(0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue) << "more shared memory than was asked for";
  EXPECT_EQ(cudaMemcpyAsync(host_.data(), device_, 8, cudaMemcpyHostToDevice, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostRegister(host_.data() + 100, 8, 0), cudaErrorHostMemoryAlreadyRegistered);
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, std::size_t{1} << 45), cudaErrorMemoryAllocation);
}

// Which is what whoever asks for the last error next takes for his own.
TEST_F(Emulation, AQueryOfUnfinishedWorkLeavesAnError) {
  volatile bool open = false;
  const auto wait = [](void* gate) {
    while (!*static_cast<volatile bool*>(gate)) {
    }
  };
  ASSERT_EQ(cudaLaunchHostFunc(stream_, wait, const_cast<bool*>(&open)), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  open = true;
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

using EmulationDeathTest = Emulation;

TEST_F(EmulationDeathTest, BarriersThatSomeThreadsNeverComeToStopIt) {
  const auto run = [this](void (*kernel)(int)) {
    kernel<<<1, 64, 0, stream_>>>(0);
    cudaStreamSynchronize(stream_);
  };
  EXPECT_DEATH(run(leave_before_barrier), "some threads of a block never come to a barrier");
  EXPECT_DEATH(run(leave_before_exchange), "some lanes of a warp never come to where the others exchange");
}

TEST_F(EmulationDeathTest, SharedMemoryEndsWhereItEnds) {
  write_behind_shared<<<1, 32, 64, stream_>>>(63);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  const auto run = [this] {
    write_behind_shared<<<1, 32, 64, stream_>>>(64);
    cudaStreamSynchronize(stream_);
  };
  EXPECT_DEATH(run(), "written beyond its end");
}

TEST_F(EmulationDeathTest, TheHostDoesNotSeeDeviceMemory) {
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile int*>(device_)), "");
}

TEST_F(EmulationDeathTest, HostFunctionsCallNothingOfCudas) {
  const auto run = [this] {
    cudaLaunchHostFunc(
        stream_, [](void* stream) { cudaStreamQuery(static_cast<cudaStream_t>(stream)); }, stream_);
    cudaStreamSynchronize(stream_);
  };
  EXPECT_DEATH(run(), "a host function in a stream calls CUDA");
}

}  // namespace
}  // namespace spillway::emulated
