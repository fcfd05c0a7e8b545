#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "kernels/host_device.h"
#include "spillway/units.h"
#include "tests/heap_watch.h"
#include "tests/kernels/device_suite.h"

namespace spillway {

std::unique_ptr<Device> make_host(HostWorkers& workers) {
  return create_host_device({.hbm_bytes = 64 * kMiB}, workers);
}
// The suite runs on a device with slow copies as well: timing must not be what makes it pass.
std::unique_ptr<Device> make_slow_host(HostWorkers& workers) {
  return create_host_device({.hbm_bytes = 64 * kMiB, .copy_delay_seconds = 1e-3}, workers);
}

const auto kHostCases = testing::Values(DeviceCase{"host", make_host}, DeviceCase{"host_slow_copies", make_slow_host});
const auto kCaseName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Host, DeviceSuite, kHostCases, kCaseName);
INSTANTIATE_TEST_SUITE_P(Host, DeviceSuiteDeathTest, testing::Values(DeviceCase{"host", make_host}), kCaseName);

namespace {

std::size_t resident_pages(std::span<std::byte> memory) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(div_up(memory.size(), page));
  EXPECT_EQ(mincore(memory.data(), memory.size(), pages.data()), 0);
  return static_cast<std::size_t>(std::ranges::count_if(pages, [](unsigned char p) { return p & 1; }));
}

class HostDevice : public testing::Test {
 protected:
  std::unique_ptr<HostWorkers> workers_ = create_workers(2);
};

TEST_F(HostDevice, HbmIsExactlyTheAskedSizeAndZero) {
  const auto device = create_host_device({.hbm_bytes = 1'000'001}, *workers_);
  EXPECT_EQ(device->hbm().size(), 1'000'001u);
  EXPECT_TRUE(std::ranges::all_of(device->hbm(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(HostDevice, PagesOfASmallArenaAreTakenOneByOne) {
  const auto device = create_host_device({.hbm_bytes = 16 * kMiB}, *workers_);
  EXPECT_EQ(resident_pages(device->hbm()), 0u);
  for (std::uint64_t at : {0 * kMiB, 5 * kMiB, 15 * kMiB}) device->hbm()[at] = std::byte{1};
  EXPECT_EQ(resident_pages(device->hbm()), 3u);
}

TEST_F(HostDevice, AnArenaThatCannotBeMappedIsAnError) {
  for (std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1} << 60, UINT64_MAX}) {
    EXPECT_THROW(create_host_device({.hbm_bytes = bytes}, *workers_), Error) << bytes;
  }
}

TEST_F(HostDevice, DescribesItself) {
  const auto device = create_host_device({.hbm_bytes = kMiB}, *workers_);
  EXPECT_EQ(device->describe(),
            "host device (the CPU): 1 MiB of RAM stand for GPU memory (hbm_bytes), small pages, 2 compute threads");
}

TEST_F(HostDevice, LaunchBlocksWhileTheRingIsFull) {
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers_);
  const auto stream = device->create_stream("stream");
  Gate gate;
  gate.enqueue(*device, *stream);
  gate.wait_reached();
  std::atomic<int> launched = 0, ran = 0;
  std::jthread feeder([&] {
    for (int i = 0; i < 2'000; ++i) {
      stream->launch([&ran](HostWorkers&) { ran.fetch_add(1); });
      launched.fetch_add(1);
    }
  });
  give_a_wrong_stream_time();
  EXPECT_LT(launched, 2'000);
  EXPECT_EQ(ran, 0);
  gate.open();
  feeder.join();
  stream->synchronize();
  EXPECT_EQ(ran, 2'000);
}

TEST_F(HostDevice, TasksSeeTheWorkersAndRunBeforeTheStreamGoes) {
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers_);
  std::vector<std::atomic<int>> runs(1'000);
  {
    const auto stream = device->create_stream("a name longer than the kernel's fifteen bytes");
    for (int i = 0; i < 50; ++i) {
      stream->launch([&runs](HostWorkers& workers) {
        workers.parallel_for(runs.size(), [&](std::size_t index) { runs[index].fetch_add(1); });
      });
    }
  }
  for (const auto& count : runs) ASSERT_EQ(count, 50);
}

TEST_F(HostDevice, ACopyTakesAtLeastItsDelay) {
  const auto device = create_host_device({.hbm_bytes = 4096, .copy_delay_seconds = 0.02}, *workers_);
  std::vector<std::byte> pinned(4096);
  device->register_host(pinned);
  const auto stream = device->create_stream("stream");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i)
    device->copy_async(CopyKind::kHostToDevice, device->hbm().data(), pinned.data(), 4096, *stream);
  stream->synchronize();
  // Not a matter of speed: three sleeps of 20 ms cannot take less.
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(60));
}

TEST_F(HostDevice, EnqueueingAllocatesNothing) {
  const auto device = create_host_device({.hbm_bytes = kMiB}, *workers_);
  std::vector<std::byte> pinned(kMiB);
  device->register_host(pinned);
  const auto a = device->create_stream("a"), b = device->create_stream("b");
  const auto event = device->create_event();
  float* const hbm = reinterpret_cast<float*>(device->hbm().data());
  const auto round = [&] {
    device->copy_async(CopyKind::kHostToDevice, hbm, pinned.data(), 4096, *a);
    device->record(*event, *a);
    device->wait(*b, *event);
    device->accumulate_async(hbm + 4096, hbm, DType::kFloat32, 1000, false, *b);
    device->cast_async(hbm + 8192, DType::kBFloat16, hbm, DType::kFloat32, 1000, *b);
    device->fill_async(hbm, std::byte{0}, 4096, *b);
    b->synchronize();
  };
  round();
  const auto rounds = [&] {
    for (int i = 0; i < 100; ++i) round();
  };
  EXPECT_EQ(allocations_of(rounds), 0u);
  device->unregister_host(pinned);
}

TEST_F(HostDevice, MemoryCanBeRegisteredAgainAfterItWasUnregistered) {
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers_);
  std::vector<std::byte> memory(4096);
  const auto halves = std::span(memory);
  device->register_host(halves.first(2048));
  device->register_host(halves.last(2048));
  EXPECT_THROW(device->register_host(halves), Error);
  device->unregister_host(halves.first(2048));
  device->register_host(halves.first(2048));
}

TEST_F(HostDevice, ManyStreamsAndThreadsAtOnce) {
  const auto device = create_host_device({.hbm_bytes = 8 * kMiB}, *workers_);
  std::vector<std::byte> pinned(8 * kMiB, std::byte{1});
  device->register_host(pinned);
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const auto copies = device->create_stream("copies"), compute = device->create_stream("compute");
        const auto copied = device->create_event(), used = device->create_event();
        std::byte* const mine = device->hbm().data() + t * 2 * kMiB;
        for (int i = 1; i <= 30; ++i) {
          if (used->recorded()) device->wait(*copies, *used);
          device->copy_async(CopyKind::kHostToDevice, mine, pinned.data() + t * 2 * kMiB, kMiB, *copies);
          device->record(*copied, *copies);
          device->wait(*compute, *copied);
          device->accumulate_async(reinterpret_cast<float*>(mine + kMiB), mine, DType::kFloat32, kMiB / 4, i == 1,
                                   *compute);
          device->record(*used, *compute);
        }
        compute->synchronize();
      });
    }
  }
  const float one = std::bit_cast<float>(0x01010101u);
  float expected = one;
  for (int i = 2; i <= 30; ++i) expected += one;
  for (std::size_t t = 0; t < 4; ++t) {
    const float* sums = reinterpret_cast<const float*>(device->hbm().data() + t * 2 * kMiB + kMiB);
    EXPECT_TRUE(std::all_of(sums, sums + kMiB / 4, [&](float x) { return x == expected; })) << t;
  }
}

// Also what lets /proc/PID/smaps tell two arenas apart: the kernel merges neighbours that are alike.
TEST_F(HostDevice, NothingBesideTheArenaCanBeTouched) {
  const auto device = create_host_device({.hbm_bytes = 3 * kMiB}, *workers_);
  const std::span<std::byte> hbm = device->hbm();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  // The kernel reads for us, and says where it may not.
  EXPECT_EQ(write(ends[1], hbm.data(), 1), 1);
  EXPECT_EQ(write(ends[1], hbm.data() + hbm.size() - 1, 1), 1);
  for (const std::byte* outside : {hbm.data() - 1, hbm.data() + hbm.size()}) {
    EXPECT_EQ(write(ends[1], outside, 1), -1);
    EXPECT_EQ(errno, EFAULT);
  }
  for (const int end : ends) close(end);
}

using HostDeviceDeathTest = HostDevice;

TEST_F(HostDeviceDeathTest, ATaskMustNotFeedOrWaitForItsOwnStream) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers_);
  const auto stream = device->create_stream("stream");
  Stream* const self = stream.get();
  const auto run = [&](const HostTask& task) {
    stream->launch(task);
    stream->synchronize();
  };
  EXPECT_DEATH(run([self](HostWorkers&) { self->synchronize(); }), "a stream cannot wait for itself");
  EXPECT_DEATH(run([self](HostWorkers&) { self->launch([](HostWorkers&) {}); }), "must not feed that stream");
}

TEST_F(HostDeviceDeathTest, UnregisteringWhatWasNotRegisteredDies) {
  const auto device = create_host_device({.hbm_bytes = 4096}, *workers_);
  std::vector<std::byte> memory(4096);
  device->register_host(memory);
  EXPECT_DEATH(device->unregister_host(std::span(memory).first(10)), "only what was registered");
}

}  // namespace
}  // namespace spillway
