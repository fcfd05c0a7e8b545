// BlockSpiller over a real store and the host device, and back with the BlockFetcher.
#include <atomic>
#include <thread>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "swap/block_fetcher.h"
#include "swap/block_spiller.h"
#include "tests/seed.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

constexpr std::uint64_t kChunkBytes = kGranuleBytes;
constexpr std::uint64_t kScratchBytes = 8 << 20, kHbmBytes = 4 << 20;

class Spill : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreShape shape = three_tiles();
    shape.scratch_bytes = kScratchBytes;
    store = TileStore::create(directory.path(), shape, false);
    device->register_host(host.memory());
    thread = thread_for(*store, host);
    make_spiller(2);
    for (std::size_t at = 0; at < kHbmBytes; at += 8) {
      const std::uint64_t word = random();
      std::memcpy(device->hbm().data() + at, &word, 8);
    }
  }
  void TearDown() override {
    spiller.reset();
    thread.reset();
  }
  void make_spiller(std::size_t chunks) {
    spiller.reset();
    spiller = std::make_unique<BlockSpiller>(*thread, *device, *d2h, host.memory().first(chunks * kChunkBytes),
                                             kChunkBytes, 8);
  }
  Extent scratch(std::uint64_t offset, std::uint64_t bytes) const {
    return {.offset = store->layout().scratch_offset + offset, .bytes = align_up(bytes, kExtentAlignment)};
  }
  std::vector<std::byte> stored(const Extent& extent) const {
    AlignedBuffer buffer(extent.bytes);
    store->files().read_at(extent.offset, buffer.bytes());
    return {buffer.bytes().begin(), buffer.bytes().end()};
  }
  // The payload from `from`, zeros after it, and the checksum of both.
  void expect_stored(const SpillPiece& piece, const std::byte* from) const {
    const auto bytes = stored(piece.extent);
    EXPECT_EQ(std::memcmp(bytes.data(), from, piece.payload_bytes), 0);
    EXPECT_TRUE(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(piece.payload_bytes), bytes.end(),
                            [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(checksum_of(bytes), piece.checksum);
  }

  StoreDirectory directory;
  HostArena host{4 << 20, kPinnedArena};
  std::mt19937_64 random{5};
  std::unique_ptr<TileStore> store;
  std::unique_ptr<HostWorkers> workers = create_workers(2);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = kHbmBytes}, *workers);
  std::unique_ptr<Stream> compute = device->create_stream("compute"), d2h = device->create_stream("d2h");
  std::unique_ptr<StoreThread> thread;
  std::unique_ptr<BlockSpiller> spiller;
};

// Random pieces, several spills at a time, with fewer chunks than one piece has and with more.
TEST_F(Spill, EveryPieceIsStoredWholeWithItsChecksum) {
  random.seed(test_seed());
  for (std::size_t chunks : {1u, 2u, 8u}) {
    make_spiller(chunks);
    std::vector<std::unique_ptr<BlockSpill>> spills;
    for (int s = 0; s < 4; ++s) spills.push_back(std::make_unique<BlockSpill>(*device, 3, 64));
    for (int round = 0; round < 5; ++round) {
      std::uint64_t at = 0;
      for (auto& spill : spills) {
        spill->pieces.clear();
        for (std::uint64_t count = 1 + random() % 3; count > 0; --count) {
          const std::uint64_t bytes = 1 + random() % (600 * 1024);
          const std::uint64_t from = random() % (kHbmBytes - bytes);
          spill->pieces.push_back(
              {.from = device->hbm().data() + from, .payload_bytes = bytes, .extent = scratch(at, bytes)});
          at += spill->pieces.back().extent.bytes;
        }
        spiller->start(*spill);
      }
      for (auto& spill : spills) {
        spiller->wait_written(*spill);
        EXPECT_TRUE(spiller->written(*spill));
        for (const SpillPiece& piece : spill->pieces) expect_stored(piece, piece.from);
      }
    }
  }
}

TEST_F(Spill, WhatIsOverwrittenBehindLeftIsStoredAsItWas) {
  BlockSpill spill(*device, 1, 8);
  const std::uint64_t bytes = 1 << 20;
  const std::vector<std::byte> before(device->hbm().begin(), device->hbm().begin() + bytes);
  spill.pieces.push_back({.from = device->hbm().data(), .payload_bytes = bytes, .extent = scratch(0, bytes)});
  spiller->start(spill);
  spiller->wait_left(spill);
  device->wait(*compute, spill.left());
  device->fill_async(device->hbm().data(), std::byte{0xff}, bytes, *compute);
  spiller->wait_written(spill);
  expect_stored(spill.pieces[0], before.data());
  compute->synchronize();
  EXPECT_EQ(device->hbm()[0], std::byte{0xff});
}

// What the memory is filled with by work that is enqueued before `after`, however late that runs, is what is stored.
TEST_F(Spill, CopiesWaitForTheEventThatTheyCameWith) {
  const auto produced = device->create_event();
  std::atomic<bool> go = false;
  const std::uint64_t bytes = 700 * 1024;
  const std::vector<std::byte> expected(bytes, std::byte{7});
  compute->launch([&go](HostWorkers&) {
    while (!go) std::this_thread::yield();
  });
  device->fill_async(device->hbm().data(), std::byte{7}, bytes, *compute);
  device->record(*produced, *compute);
  BlockSpill spill(*device, 2, 8);
  const auto landed = host.memory().subspan(2 << 20, bytes);
  spill.after = produced.get();
  spill.pieces.push_back({.from = device->hbm().data(), .payload_bytes = bytes, .extent = scratch(0, bytes)});
  spill.pieces.push_back({.from = device->hbm().data(), .payload_bytes = bytes, .resident = landed.data()});
  spiller->start(spill);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(spiller->written(spill));
  go = true;
  spiller->wait_written(spill);
  expect_stored(spill.pieces[0], expected.data());
  device->synchronize(spill.left());
  EXPECT_EQ(std::memcmp(landed.data(), expected.data(), bytes), 0);
}

TEST_F(Spill, TheFetcherBringsBackWhatWasSpilledAndRefusesWhatRotted) {
  const auto h2d = device->create_stream("h2d");
  BlockFetcher fetcher(*thread, *device, *h2d, host.memory().subspan(2 << 20, 2 * kChunkBytes), kChunkBytes,
                       [](std::uint32_t) { return std::string("the spilled bytes"); });
  const std::uint64_t bytes = 900'001;
  BlockSpill spill(*device, 1, 8);
  BlockFetch fetch(*device, 1, 8);
  spill.pieces.push_back({.from = device->hbm().data(), .payload_bytes = bytes, .extent = scratch(65536, bytes)});
  spiller->start(spill);
  spiller->wait_written(spill);
  std::byte* to = device->hbm().data() + (1 << 20);
  const auto bring = [&] {
    fetch.pieces.assign(
        1, {.to = to, .payload_bytes = bytes, .extent = spill.pieces[0].extent, .checksum = spill.pieces[0].checksum});
    fetcher.start(fetch);
    fetcher.wait_open(fetch);
  };
  bring();
  device->synchronize(fetch.ready());
  EXPECT_EQ(std::memcmp(to, device->hbm().data(), bytes), 0);
  directory.damage(spill.pieces[0].extent.offset + bytes - 1);
  EXPECT_THROW(bring(), Error);
}

}  // namespace
}  // namespace spillway
