// What waits for I/O when the queue itself fails (the ring is gone, say) must not wait for ever.
//
// The program is linked with `--wrap` (meson.build), so that the store's thread gets a queue that can be told to fail.
#include <atomic>
#include <stdexcept>
#include <string>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "swap/block_fetcher.h"
#include "swap/block_spiller.h"
#include "tests/aio/forwarding_queue.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

std::atomic<int> submits_left = -1;  // then submit() throws; negative: never
std::atomic<bool> wait_fails = false;
std::atomic<bool> fails_in_flight = false;  // once the drive has got to work

class FailingQueue final : public testing::ForwardingQueue {
 public:
  using ForwardingQueue::ForwardingQueue;
  void submit(const IoRequest& request) override {
    if (submits_left == 0) throw std::runtime_error("the ring takes nothing more");
    if (submits_left > 0) --submits_left;
    real_->submit(request);
  }
  std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) override {
    if (wait_fails) throw std::runtime_error("the ring is gone");
    if (!fails_in_flight || real_->pending() == 0) return real_->wait(out, timeout_seconds);
    real_->wait(out, 0);
    throw std::runtime_error("the ring is gone while it is in use");
  }
};

}  // namespace

std::unique_ptr<IoQueue> real_create(const IoQueueOptions&, Files, Regions) __asm__("__real_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> failing_create(const IoQueueOptions&, Files, Regions) __asm__("__wrap_" SPILLWAY_CREATE_QUEUE);
std::unique_ptr<IoQueue> failing_create(const IoQueueOptions& options, Files files, Regions regions) {
  return std::make_unique<FailingQueue>(real_create(options, files, regions));
}

namespace {

using namespace testing;

class QueueFailure : public ::testing::Test {
 protected:
  void SetUp() override {
    write_tiles(*store, three_tiles(), *thread, arena, 5, true);
    store->commit(0, {}, *thread, arena.memory());
  }
  ~QueueFailure() override {
    thread.reset();  // returns
    submits_left = -1;
    wait_fails = fails_in_flight = false;
  }
  IoRequest read(int index) const {
    return {.op = IoOp::kRead, .offset = 65536, .buffer = arena.memory().data() + index * 65536, .bytes = 65536};
  }
  void fetch_fails(std::uint64_t payload_bytes);
  static void expect_failure(IoBatch& batch) {
    try {
      batch.wait();
      ADD_FAILURE() << "the queue is gone";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kIo);
      EXPECT_EQ(error.parts().errno_value, EIO);
      EXPECT_NE(error.parts().happened.find("read of 65536 bytes at offset 65536"), std::string::npos) << error.what();
      EXPECT_NE(error.parts().happened.find("the I/O queue itself failed: the ring "), std::string::npos)
          << error.what();
    }
  }

  StoreDirectory directory;
  HostArena arena{4 << 20, kPinnedArena};
  std::unique_ptr<TileStore> store = TileStore::create(directory.path(), three_tiles(), false);
  std::unique_ptr<StoreThread> thread = thread_for(*store, arena);
};

TEST_F(QueueFailure, EveryRequestUnderWayAndEveryLaterOneFails) {
  IoBatch batch(*thread);
  wait_fails = true;
  for (int i = 0; i < 20; ++i) batch.add(read(i));
  expect_failure(batch);
  for (int round = 0; round < 3; ++round) {
    batch.add(read(round));
    expect_failure(batch);
  }
}

TEST_F(QueueFailure, RequestsThatTheQueueDidNotTakeFailToo) {
  for (int taken : {0, 3}) {
    submits_left = taken;
    IoBatch batch(*thread);
    for (int i = 0; i < 40; ++i) batch.add(read(i));
    expect_failure(batch);
  }
}

// What the drive still works on is waited for by the thread that may, when all is over.
TEST_F(QueueFailure, LeavesNothingInFlightBehind) {
  IoBatch batch(*thread);
  fails_in_flight = true;
  for (int i = 0; i < 60; ++i) batch.add(read(i));
  expect_failure(batch);
  thread.reset();
}

// Its handler posts the next reads from the store's own thread, while that is failing the ones before. A chunk without
// payload is free again at once, so that its handler itself posts the next read.
void QueueFailure::fetch_fails(std::uint64_t payload_bytes) {
  const auto workers = create_workers(2);
  const auto device = create_host_device({.hbm_bytes = 1 << 20}, *workers);
  device->register_host(arena.memory());
  const auto h2d = device->create_stream("h2d");
  {
    constexpr std::uint64_t kChunk = kGranuleBytes;
    BlockFetcher fetcher(*thread, *device, *h2d, arena.memory().first(kChunk), kChunk,
                         [](std::uint32_t tile) { return std::to_string(tile); });
    BlockFetch fetches[] = {{*device, 2, 8}, {*device, 2, 8}, {*device, 2, 8}};
    const auto start = [&](BlockFetch& fetch) {
      const TileStore::Slot slot = store->readable(0);
      fetch.pieces.assign(1, {.tile = 0,
                              .to = device->hbm().data(),
                              .payload_bytes = payload_bytes,
                              .extent = slot.extent[0],
                              .checksum = slot.checksum[0]});
      fetcher.start(fetch);
    };
    submits_left = 1;  // the second chunk is refused, inside the handler of the first
    for (BlockFetch& fetch : fetches) start(fetch);
    for (BlockFetch& fetch : fetches) EXPECT_THROW(fetcher.wait_open(fetch), Error);
    start(fetches[0]);
    EXPECT_THROW(fetcher.wait_open(fetches[0]), Error);
  }
  device->unregister_host(arena.memory());
}

TEST_F(QueueFailure, AFetchFails) { fetch_fails(payload_bytes(three_tiles().tiles[0], Part::kWeights)); }

TEST_F(QueueFailure, AFetchFailsInsideOfItsHandler) { fetch_fails(0); }

TEST_F(QueueFailure, ASpillFails) {
  const auto workers = create_workers(2);
  const auto device = create_host_device({.hbm_bytes = 4 << 20}, *workers);
  device->register_host(arena.memory());
  const auto d2h = device->create_stream("d2h");
  {
    constexpr std::uint64_t kChunk = kGranuleBytes;
    BlockSpiller spiller(*thread, *device, *d2h, arena.memory().first(kChunk), kChunk, 3);
    BlockSpill spills[] = {{*device, 1, 16}, {*device, 1, 16}, {*device, 1, 16}};
    const auto start = [&](BlockSpill& spill) {
      spill.pieces.assign(1, {.from = device->hbm().data(),
                              .payload_bytes = 4 * kChunk,
                              .extent = {.offset = store->layout().scratch_offset, .bytes = 4 * kChunk}});
      spiller.start(spill);
    };
    submits_left = 1;  // the second chunk is refused, inside the handler of a wake
    for (BlockSpill& spill : spills) start(spill);
    for (BlockSpill& spill : spills) EXPECT_THROW(spiller.wait_written(spill), Error);
    start(spills[0]);
    EXPECT_THROW(spiller.wait_left(spills[0]), Error);
  }
  device->unregister_host(arena.memory());
}

}  // namespace
}  // namespace spillway
