// AccumulatorPlaces on the host device: whatever order blocks come in, and however few places there are, sums are what
// they would be in memory of their own.
#include "swap/accumulator_places.h"
#include "kernels/host_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "kernels/host_memory.h"
#include "kernels/workers.h"
#include "tests/seed.h"

namespace spillway {
namespace {

constexpr std::uint32_t kBlocks = 5;

class Accumulators : public ::testing::Test {
 protected:
  void SetUp() override {
    random.seed(test_seed());
    for (std::uint32_t b = 0; b < kBlocks; ++b) counts.push_back(1000 + random() % 20'000);
    std::ranges::sort(counts, std::greater<>());  // the first place fits the first block
    device->register_host(host.memory());
    for (float* sums : {begun.data(), wanted.data()}) std::fill_n(sums, kBlocks * kMost, 0.f);
  }
  void TearDown() override {
    compute->synchronize();
    other->synchronize();
    places->wait_idle();
    places.reset();
    device->unregister_host(host.memory());
  }

  // Some places fit only small blocks.
  void make(std::uint32_t count) {
    std::vector<std::span<std::byte>> memory, homes;
    for (std::uint32_t p = 0; p < count; ++p) {
      memory.push_back(device->hbm().subspan(p * kMost * 4, counts[std::min(p, kBlocks - 1)] * 4));
    }
    for (std::uint32_t b = 0; b < kBlocks; ++b) homes.push_back(host.memory().subspan(b * kMost * 4, counts[b] * 4));
    homes.push_back({});
    places = std::make_unique<AccumulatorPlaces>(*device, *h2d, *d2h, memory, homes);
  }

  void add(std::uint32_t b) {
    const float value = static_cast<float>(random() % 1000);
    const bool beside = random() % 3 == 0;  // on a stream of the caller's own
    Stream& stream = beside ? *other : *compute;
    std::byte* from = device->hbm().data() + (beside ? kGradients + kMost * 4 : kGradients);
    const std::size_t n = counts[b];
    stream.launch([=](HostWorkers&) { std::fill_n(reinterpret_cast<float*>(from), n, value); });
    float* sums = places->acquire(b, stream);
    device->accumulate_async(sums, from, DType::kFloat32, n, begun[b] == 0, stream);
    wanted[b] = begun[b] == 0 ? value : wanted[b] + value;
    begun[b] = 1;
  }

  void complete_and_expect(std::uint32_t b) {
    const float* sums = places->acquire(b, *compute);
    std::vector<float>& out = read[b];
    if (!out.empty()) compute->synchronize();  // it may be written to yet
    out.assign(counts[b], -1);
    const std::size_t n = counts[b];
    compute->launch([=, to = out.data()](HostWorkers&) { std::copy_n(sums, n, to); });
    places->complete(b, *compute);
    expected[b] = wanted[b];
    begun[b] = 0;
  }
  void expect_all() {
    compute->synchronize();
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      if (read[b].empty()) continue;
      EXPECT_TRUE(std::ranges::all_of(read[b], [&](float value) { return value == expected[b]; })) << "block " << b;
    }
  }

  static constexpr std::uint64_t kMost = 21'000, kGradients = 6 * kMost * 4;
  std::mt19937_64 random;
  std::vector<std::uint64_t> counts;  // elements of a block
  std::unique_ptr<HostWorkers> workers = create_workers(2);
  HostArena host{kBlocks * kMost * 4, kPinnedArena};
  // Copies come late, so that whoever does not wait for them reads or writes too early.
  std::unique_ptr<Device> device =
      create_host_device({.hbm_bytes = 8 * kMost * 4, .copy_delay_seconds = 0.0005}, *workers);
  std::unique_ptr<Stream> compute = device->create_stream("compute"), other = device->create_stream("other"),
                          h2d = device->create_stream("h2d"), d2h = device->create_stream("d2h");
  std::unique_ptr<AccumulatorPlaces> places;
  std::vector<float> begun = std::vector<float>(kBlocks * kMost), wanted = begun, expected = begun;
  std::vector<float> read[kBlocks];
};

TEST_F(Accumulators, HoldWhatWasAddedInAnyOrderInAnyNumberOfPlaces) {
  for (std::uint32_t count = 1; count <= kBlocks; ++count) {
    make(count);
    for (int step = 0; step < 6; ++step) {
      places->begin_step();
      for (std::uint64_t visits = random() % 40; visits > 0; --visits) {
        const auto b = static_cast<std::uint32_t>(random() % kBlocks);
        if (random() % 4 > 0) places->expect(b);
        add(b);
        if (random() % 3 == 0) add(static_cast<std::uint32_t>(random() % kBlocks));  // of another one in its visit
        if (random() % 8 == 0) complete_and_expect(b);
      }
      for (std::uint32_t b = 0; b < kBlocks; ++b) {
        if (begun[b] > 0) complete_and_expect(b);
      }
      expect_all();
    }
  }
}

TEST_F(Accumulators, AStepThatIsGivenUpLeavesNothing) {
  make(2);
  for (int step = 0; step < 20; ++step) {
    for (std::uint32_t b = 0; b < kBlocks; ++b) add(b);
    for (std::uint32_t b = 0; b < kBlocks; ++b) places->expect(b);
    places->wait_idle();
    compute->synchronize();
    other->synchronize();
    places->begin_step();
    std::ranges::fill(begun, 0.f);
    for (std::uint32_t b = kBlocks; b-- > 0;) {
      places->expect(b);
      add(b);
    }
    for (std::uint32_t b = 0; b < kBlocks; ++b) complete_and_expect(b);
    expect_all();
    places->begin_step();
  }
}

TEST_F(Accumulators, ComeOnceTheyHaveArrivedAtHome) {
  make(2);
  places->begin_step();
  add(0);
  add(1);
  places->expect(1);
  compute->synchronize();
  d2h->synchronize();
  d2h->launch([](HostWorkers&) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  places->expect(2);  // 1 leaves late
  places->acquire(2, *compute);
  places->complete(2, *compute);
  places->expect(3);  // in the place that is free since then
  places->expect(4);  // in that of 1
  places->expect(1);  // in that of 3
  add(1);
  complete_and_expect(1);
  add(0);
  complete_and_expect(0);
  expect_all();
}

// Of three micro-batches in two places: what is added to leaves after all but its last visit and comes for all but its
// first, and the block that a micro-batch ends with is still there when the next begins with it.
TEST_F(Accumulators, MoveNoMoreThanTheyMust) {
  make(2);
  std::uint64_t all = 0;
  for (const std::uint64_t count : counts) all += count * 4;
  places->begin_step();
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::uint32_t b = micro_batch % 2 == 0 ? i : kBlocks - 1 - i;  // there and back
      places->expect(b);
      add(b);
      if (micro_batch == 2) complete_and_expect(b);
    }
  }
  expect_all();
  const std::uint64_t first = counts[0] * 4, last = counts[kBlocks - 1] * 4;
  // Which of two places a block finds free is a matter of their sizes: one more of them may be there still.
  EXPECT_LE(places->h2d_bytes(), 2 * all - first - last);
  EXPECT_LE(places->d2h_bytes(), 2 * all - first - last);
  EXPECT_GE(places->d2h_bytes(), 2 * (all - first - last - counts[1] * 4 - counts[kBlocks - 2] * 4));
}

}  // namespace
}  // namespace spillway
