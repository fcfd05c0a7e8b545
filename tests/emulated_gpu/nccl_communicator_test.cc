// The behaviour suite of communicators on GPUs that NCCL joins, both emulated: ranks are threads of this process, each
// with a GPU of its own.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/loader.h"
#include "spillway/error.h"
#include "spillway/gpu_ranks.h"
#include "src/comm/nccl_plugin.h"
#include "tests/error_of.h"
#include "tests/kernels/gate.h"
#include "tests/src/comm/communicator_suite.h"
#include "tests/src/comm/thread_ranks.h"

namespace spillway {
namespace {

std::shared_ptr<Device> make_gpu(std::uint64_t hbm_bytes, HostWorkers&) {
  return create_cuda_device({.hbm_bytes = hbm_bytes});
}

// Before anything is asked of one.
[[maybe_unused]] const int kSet = ::setenv("SPILLWAY_EMULATED_GPUS", "5", 1);

// Each on a GPU of its own.
void run_on(ThreadHub& hub, std::uint32_t ranks, const RanksOptions& options,
            const std::function<void(Communicator&)>& body) {
  testing::run_ranks_on(hub, ranks, options.limits, options.patience_seconds, [&](Communicator& communicator) {
    ASSERT_EQ(cudaSuccess, cudaSetDevice(static_cast<int>(communicator.rank())));
    join_gpus(dynamic_cast<TransportCommunicator&>(communicator), options.limits);
    body(communicator);
  });
}

void run_nccl(std::uint32_t ranks, const RanksOptions& options, const std::function<void(Communicator&)>& body) {
  ThreadHub hub(ranks);
  run_on(hub, ranks, options, body);
}

RanksCase ranks_on_gpus(std::uint32_t ranks) {
  const std::uint32_t joining =
      ranks == 1 ? 0 : 5;  // whether all have prepared, their GPUs, an id, the id, all connected
  return {"nccl_" + std::to_string(ranks), ranks, run_nccl, make_gpu, joining};
}

const auto kCases =
    ::testing::Values(ranks_on_gpus(1), ranks_on_gpus(2), ranks_on_gpus(3), ranks_on_gpus(4), ranks_on_gpus(5));
const auto kSeveral = ::testing::Values(ranks_on_gpus(2), ranks_on_gpus(3), ranks_on_gpus(5));
const auto kCaseName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorSuite, kCases, kCaseName);
INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorFailures, kSeveral, kCaseName);

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(NcclRanks, SayWhatMovesTheirData) {
  run_nccl(2, {}, [](Communicator& communicator) {
    EXPECT_THAT(communicator.describe(), HasSubstr(", over threads, and NCCL 2."));
    join_gpus(communicator);  // they are
    if (communicator.rank() == 1) static_cast<void>(cudaSetDevice(3));
    const Error error = testing::error_of([&] { join_gpus(communicator); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_THAT(
        error.what(),
        StartsWith("rank 1: communicator nccl: GPU 3 is current, and another one was joined; make all engines"));
  });
}

TEST(NcclRanks, OneOrderCountsForStreamsOfBothDevices) {
  run_nccl(3, {}, [](Communicator& communicator) {
    Member gpu(communicator, make_gpu), host(communicator);
    for (std::uint64_t i = 0; i < 40; ++i) {
      std::uint64_t one = i, other = i;
      communicator.all_reduce(std::span(&one, 1), Fold::kSum, 1, *gpu.a);
      communicator.all_reduce(std::span(&other, 1), Fold::kSum, 2, *host.a);
      communicator.broadcast(gpu.hbm<std::byte>(0, 100), 0, 3, *gpu.b);
      gpu.wait_idle();
      host.wait_idle();
      ASSERT_EQ(one, 3 * i);
      ASSERT_EQ(other, 3 * i);
    }
  });
}

TEST(NcclRanks, ASilentRankIsNamedWithItsHostAndStreamsGoOn) {
  ThreadHub hub(3);
  run_on(hub, 3, {.patience_seconds = 1.5}, [&](Communicator& communicator) {
    Member member(communicator, make_gpu);
    member.comm.barrier(7, *member.a);
    member.wait_idle();
    if (member.rank == 1) {
      hub.silence(1);
      EXPECT_THAT(end_of(member), HasSubstr("no progress in 1.5 s: ranks 0 and 2 (host0, host2) do not answer"));
      return;
    }
    EXPECT_THAT(end_of(member), AllOf(StartsWith("barrier of block 0 "), HasSubstr("rank 1 (host1) does not answer")));
    member.upload(0, std::vector<int>{1, 2, 3});
    EXPECT_EQ(member.download<int>(0, 3), (std::vector<int>{1, 2, 3}));
  });
}

// All have agreed, and one rank's GPU is busy for longer than the others are patient: NCCL waits in their streams.
TEST(NcclRanks, ARankWhoseStreamDoesNotComeIsNamedWhileOthersAreInNccl) {
  run_nccl(3, {.patience_seconds = 3}, [](Communicator& communicator) {
    Member member(communicator, make_gpu);
    const std::vector<std::uint64_t> slices(3, 1000);
    member.comm.barrier(7, *member.a);
    member.wait_idle();
    Gate gate;
    if (member.rank == 2) gate.enqueue(*member.device, *member.a);
    member.comm.all_gather(member.hbm<std::byte>(0, 3000), slices, 8, *member.a);
    std::string end;
    while (end.empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      try {
        member.comm.throw_if_failed();
      } catch (const Error& error) {
        end = error.what();
      }
    }
    gate.open();
    EXPECT_THAT(end, AllOf(StartsWith("all_gather of block 8 "), HasSubstr("no progress in 3 s: rank 2"),
                           HasSubstr(" has not come to it (its last one is 6); ")));
    member.a->synchronize();
  });
}

// A rank that computes for long holds nobody up but itself.
TEST(NcclRanks, PatienceIsNotCountedWhileTheOwnStreamComputes) {
  run_nccl(2, {.patience_seconds = 2}, [](Communicator& communicator) {
    Member member(communicator, make_gpu);
    Gate gate;
    gate.enqueue(*member.device, *member.a);
    member.comm.all_gather(member.hbm<std::byte>(0, 2000), std::vector<std::uint64_t>(2, 1000), 8, *member.a);
    std::this_thread::sleep_for(std::chrono::milliseconds(5000));
    gate.open();
    member.wait_idle();
  });
}

TEST(NcclRanks, TwoThatHaveTheSameGpuAreNamedOnAll) {
  testing::run_ranks(3, [](Communicator& communicator) {
    ASSERT_EQ(cudaSuccess, cudaSetDevice(communicator.rank() == 0 ? 1 : 2));
    const Error error = testing::error_of([&] { join_gpus(dynamic_cast<TransportCommunicator&>(communicator), {}); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_THAT(error.what(),
                StartsWith("communicator nccl: ranks 1 and 2 have the same GPU; give each rank one of its own, by"));
  });
}

TEST(NcclRanks, ARankThatCannotJoinIsNamedOnAll) {
  ThreadHub hub(2);
  testing::run_ranks_on(hub, 2, {}, 30, [](Communicator& communicator) {
    TransferLimits limits;
    if (communicator.rank() == 1) limits.scratch_bytes = std::uint64_t{1} << 50;  // of GPU memory
    const Error error =
        testing::error_of([&] { join_gpus(dynamic_cast<TransportCommunicator&>(communicator), limits); });
    EXPECT_EQ(error.code(), Code::kDevice);
    EXPECT_THAT(error.what(), AllOf(StartsWith("rank 1: "), HasSubstr("out of memory")));
  });
}

}  // namespace
}  // namespace spillway
