// TileMover over a real store and the host device, with tiles at home in every place there is.
#include "swap/tile_mover.h"
#include "kernels/host_device.h"

#include <algorithm>
#include <functional>

#include "kernels/device.h"
#include "kernels/workers.h"
#include "spillway/units.h"
#include "tests/kernels/random.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

constexpr Part kBothParts[] = {Part::kWeights, Part::kStates};

StoreShape some_tiles() {
  StoreShape shape;
  for (std::uint64_t units : {70, 1, 33, 64, 5, 2}) {
    shape.tiles.push_back({.count = units * 1024, .type = DType::kBFloat16, .trainable = units != 33 && units != 2});
  }
  shape.scratch_bytes = 65536;
  shape.identity = {.description = "some tiles", .fingerprint = 7};
  return shape;
}

class Mover : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kBuffers = 3;
  static constexpr std::uint64_t kRecordBytes = 64 * kKiB;

  Mover() {
    device->register_host(host.memory());
    store = TileStore::create(directory.path(), shape, false);
    thread = thread_for(*store, host);
  }
  ~Mover() override {
    mover.reset();
    thread.reset();
    h2d.reset();
    d2h.reset();
    device->unregister_host(host.memory());
  }

  // Homes as given by `choose`, which is asked for every part of every tile; offsets one after the other.
  void choose_homes(const std::function<Home(std::uint32_t tile, Part part)>& choose) {
    mover.reset();
    places.clear();
    std::uint64_t hbm = 0, arena = kRecordBytes + kBuffers * kBufferBytes;
    for (std::uint32_t t = 0; t < shape.tiles.size(); ++t) {
      TilePlace place{.shape = shape.tiles[t]};
      for (Part part : kBothParts) {
        const Home home = choose(t, part);
        std::uint64_t& next = home == Placement::kHost ? arena : hbm;
        place.home[index_of(part)] = home;
        place.offset[index_of(part)] = next;
        next += home == Placement::kNvme ? 0 : extent_bytes(place.shape, part);
      }
      if (place.home[0] != Placement::kHbm && t % 2 == 0) {  // a copy for compute
        place.hbm_weights = hbm;
        hbm += extent_bytes(place.shape, Part::kWeights);
      }
      places.push_back(place);
    }
    ASSERT_LE(hbm, device->hbm().size());
    ASSERT_LE(arena, host.memory().size());
    ASSERT_EQ(mover_buffer_bytes(places), kBufferBytes);
    mover = std::make_unique<TileMover>(
        TileMoverParts{.device = device.get(),
                       .workers = workers.get(),
                       .h2d = h2d.get(),
                       .d2h = d2h.get(),
                       .thread = thread.get(),
                       .store = store.get(),
                       .tiles = places,
                       .host = host.memory(),
                       .buffers = host.memory().subspan(kRecordBytes, kBuffers * kBufferBytes),
                       .buffer_bytes = kBufferBytes,
                       .count = kBuffers,
                       .name_of = [](std::uint32_t tile) { return "tile number " + std::to_string(tile); }});
  }

  // The payload of version `version` of a part.
  std::vector<std::byte> pattern(std::uint32_t tile, Part part, int version) const {
    std::vector<std::byte> bytes(payload_bytes(shape.tiles[tile], part));
    std::mt19937_64 random(static_cast<std::uint64_t>(version) * 1000 + tile * 2 + index_of(part));
    for (std::size_t at = 0; at < bytes.size(); at += 8) {  // a payload is a multiple of 1024 elements
      const std::uint64_t word = random();
      std::memcpy(bytes.data() + at, &word, 8);
    }
    return bytes;
  }
  void fill(std::uint32_t tile, const TileMemory& memory, int version) const {
    for (Part part : kBothParts) {
      const auto bytes = pattern(tile, part, version);
      if (!bytes.empty()) std::memcpy(memory.part[index_of(part)], bytes.data(), bytes.size());
    }
  }
  void expect_version(std::uint32_t tile, const TileMemory& memory, int version) const {
    for (Part part : kBothParts) {
      const auto expected = pattern(tile, part, version);
      const std::byte* found = memory.part[index_of(part)];
      ASSERT_EQ(found != nullptr, !expected.empty());
      if (!found) continue;
      EXPECT_EQ(std::memcmp(found, expected.data(), expected.size()), 0)
          << "tile " << tile << " part " << index_of(part);
      static const std::vector<std::byte> zeros(kExtentAlignment);
      const std::uint64_t padding = extent_bytes(shape.tiles[tile], part) - expected.size();
      EXPECT_EQ(std::memcmp(found + expected.size(), zeros.data(), padding), 0) << "tile " << tile;
    }
  }

  void import(int version) {
    for (std::uint32_t t = 0; t < places.size(); ++t) {
      const std::uint32_t buffer = t % kBuffers;
      mover->finish_save(buffer);
      fill(t, mover->blank(t, buffer), version);
      mover->start_save(buffer, Save::kNew);
    }
    finish_saves();
  }
  // As the update does it: all buffers at work, tile i in buffer i mod kBuffers.
  void update(int from, int to) {
    std::vector<std::uint32_t> trainable;
    for (std::uint32_t t = 0; t < places.size(); ++t) {
      if (places[t].shape.trainable) trainable.push_back(t);
    }
    std::size_t loading = 0;
    for (std::size_t i = 0; i < trainable.size(); ++i) {
      for (; loading < std::min(trainable.size(), i + kBuffers); ++loading) {
        mover->start_load(trainable[loading], static_cast<std::uint32_t>(loading % kBuffers));
      }
      const auto buffer = static_cast<std::uint32_t>(i % kBuffers);
      const TileMemory memory = mover->finish_load(buffer);
      expect_version(trainable[i], memory, from);
      fill(trainable[i], memory, to);
      mover->start_save(buffer, Save::kUpdated);
    }
    finish_saves();
  }
  void finish_saves() {
    for (std::uint32_t b = 0; b < kBuffers; ++b) {
      mover->finish_save(b);
      EXPECT_TRUE(mover->idle(b));
    }
  }
  void write_back_and_commit(std::uint64_t step) {
    for (std::uint32_t t = 0; t < places.size(); ++t) {
      if (!places[t].shape.trainable) continue;
      mover->start_load(t, 0);
      mover->finish_load(0);
      mover->start_save(0, Save::kCommit);
      mover->finish_save(0);
    }
    store->commit(step, {}, *thread, host.memory().first(kRecordBytes));
  }
  void expect_everywhere(int version, Load from = Load::kHome) {
    for (std::uint32_t t = 0; t < places.size(); ++t) {
      mover->start_load(t, 1, from);
      expect_version(t, mover->finish_load(1), places[t].shape.trainable ? version : 1);
      mover->drop(1);
    }
  }
  void expect_copies_in_hbm(int version) const {
    for (std::uint32_t t = 0; t < places.size(); ++t) {
      if (!places[t].hbm_weights) continue;
      const auto expected = pattern(t, Part::kWeights, places[t].shape.trainable ? version : 1);
      EXPECT_EQ(std::memcmp(device->hbm().data() + *places[t].hbm_weights, expected.data(), expected.size()), 0) << t;
    }
  }
  std::uint64_t written_bytes() const { return thread->stats().write_bytes; }

  StoreDirectory directory;
  const StoreShape shape = some_tiles();
  // The largest tile: 140 KiB of weights and 700 KiB of states, padded to 64 KiB each.
  static constexpr std::uint64_t kBufferBytes = (192 + 704) * kKiB;
  HostArena host{8 * kMiB, kPinnedArena};
  std::unique_ptr<HostWorkers> workers = create_workers(2);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = 4 * kMiB}, *workers);
  std::unique_ptr<Stream> h2d = device->create_stream("h2d"), d2h = device->create_stream("d2h");
  std::unique_ptr<TileStore> store;
  std::unique_ptr<StoreThread> thread;
  std::vector<TilePlace> places;
  std::unique_ptr<TileMover> mover;
};

TEST_F(Mover, TilesKeepTheirBytesWhereverTheyLive) {
  std::mt19937_64 random = seeded_generator();
  for (int round = 0; round < 8; ++round) {
    choose_homes([&](std::uint32_t, Part) { return static_cast<Placement>(random() % 3); });
    import(1);
    expect_everywhere(1);
    expect_copies_in_hbm(1);
    store->commit(0, {}, *thread, host.memory().first(kRecordBytes));
    for (int version = 2; version < 5; ++version) update(version - 1, version);
    expect_everywhere(4);
    expect_copies_in_hbm(4);
    write_back_and_commit(4);
    expect_everywhere(4, Load::kStore);
    expect_everywhere(4);
    update(4, 5);
    expect_everywhere(5);
    store->forget_written();
  }
}

TEST_F(Mover, AnUpdateWritesEveryPartThatTravelsWithIt) {
  // Weights in host memory beside states on NVMe are a cache: both are written. The other way round the states wait.
  choose_homes([](std::uint32_t tile, Part part) {
    return (tile % 2 == 0) == (part == Part::kWeights) ? Placement::kHost : Placement::kNvme;
  });
  import(1);
  store->commit(0, {}, *thread, host.memory().first(kRecordBytes));
  const std::uint64_t before = written_bytes();
  update(1, 2);
  std::uint64_t expected = 0;
  for (std::uint32_t t = 0; t < places.size(); ++t) {
    if (!places[t].shape.trainable) continue;
    EXPECT_TRUE(store->written(t, Part::kWeights));
    EXPECT_EQ(store->written(t, Part::kStates), t % 2 == 0) << t;
    expected += extent_bytes(shape.tiles[t], Part::kWeights);
    if (t % 2 == 0) expected += extent_bytes(shape.tiles[t], Part::kStates);
  }
  EXPECT_EQ(written_bytes() - before, expected);
}

TEST_F(Mover, TheCommittedSlotIsNeverWritten) {
  choose_homes([](std::uint32_t, Part) { return Placement::kNvme; });
  import(1);
  store->commit(0, {}, *thread, host.memory().first(kRecordBytes));
  std::vector<TileStore::Slot> committed;
  for (std::uint32_t t = 0; t < places.size(); ++t) committed.push_back(store->readable(t));
  for (int version = 2; version < 5; ++version) update(version - 1, version);
  for (std::uint32_t t = 0; t < places.size(); ++t) {
    for (Part part : kBothParts) {
      const Extent extent = committed[t].extent[index_of(part)];
      if (extent.bytes == 0) continue;
      const auto bytes = host.memory().subspan(kRecordBytes, extent.bytes);
      store->files().read_at(extent.offset, bytes);
      const auto expected = pattern(t, part, 1);
      EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), expected.size()), 0) << "tile " << t;
    }
  }
  store->forget_written();  // a step that is taken back
  for (std::uint32_t t = 0; t < places.size(); ++t) {
    mover->start_load(t, 0);
    expect_version(t, mover->finish_load(0), 1);
    mover->drop(0);
  }
}

TEST_F(Mover, RestoringFillsHomesAndWritesNothing) {
  choose_homes([](std::uint32_t, Part) { return Placement::kNvme; });
  import(1);
  update(1, 2);
  write_back_and_commit(1);
  std::mt19937_64 random = seeded_generator();
  choose_homes([&](std::uint32_t, Part) { return static_cast<Placement>(random() % 3); });
  std::ranges::fill(device->hbm(), std::byte{0xee});
  const std::uint64_t before = written_bytes();
  for (std::uint32_t t = 0; t < places.size(); ++t) {
    const std::uint32_t buffer = t % kBuffers;
    mover->finish_save(buffer);
    mover->start_load(t, buffer, Load::kStore);
    mover->finish_load(buffer);
    mover->start_save(buffer, Save::kRestored);
  }
  finish_saves();
  expect_everywhere(2);
  expect_copies_in_hbm(2);
  EXPECT_EQ(written_bytes(), before);
  for (std::uint32_t t = 0; t < store->layout().tiles.size(); ++t) {
    for (const Part part : {Part::kWeights, Part::kStates}) EXPECT_FALSE(store->written(t, part)) << t;
  }
}

TEST_F(Mover, ABitThatFlippedOnTheDriveIsNamedAndTheOtherTilesStillLoad) {
  choose_homes([](std::uint32_t, Part) { return Placement::kNvme; });
  import(1);
  store->commit(0, {}, *thread, host.memory().first(kRecordBytes));
  for (Part part : kBothParts) {
    const Extent extent = store->readable(3).extent[index_of(part)];
    directory.damage(extent.offset + extent.bytes - 1);  // in the padding: it belongs to the checksum
    mover->start_load(3, part == Part::kWeights ? 0 : 2);
    mover->start_load(4, 1);
    try {
      mover->finish_load(part == Part::kWeights ? 0 : 2);
      ADD_FAILURE() << "damaged bytes were handed out";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kCorrupt);
      EXPECT_EQ(error.parts().object, directory.file().string());
      EXPECT_EQ(error.parts().happened, std::string(part == Part::kWeights ? "weights" : "states") +
                                            " of tile number 3 at offset " + std::to_string(extent.offset) +
                                            " do not match their checksum");
    }
    expect_version(4, mover->finish_load(1), 1);
    mover->drop(1);
    directory.damage(extent.offset + extent.bytes - 1);
  }
}

TEST_F(Mover, ABufferHoldsOneTileAtATime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  choose_homes([](std::uint32_t, Part) { return Placement::kHost; });
  import(1);
  mover->start_load(0, 0);
  EXPECT_FALSE(mover->idle(0));
  EXPECT_TRUE(mover->idle(1));
  EXPECT_DEATH(mover->start_load(1, 0), "a buffer holds one tile at a time");
  EXPECT_DEATH(mover->start_save(0, Save::kUpdated), "only a loaded tile is saved");
  EXPECT_DEATH(mover->finish_load(1), "only a started load can finish");
  mover->finish_load(0);
  mover->drop(0);
  EXPECT_TRUE(mover->idle(0));
}

// A part that lives in host memory is worked on in place: nothing moves.
TEST_F(Mover, HostMemoryIsUsedInPlace) {
  choose_homes([](std::uint32_t, Part) { return Placement::kHost; });
  import(1);
  const std::uint64_t read = thread->stats().read_bytes, h2d_before = mover->h2d_bytes();
  mover->start_load(0, 0);
  const TileMemory memory = mover->finish_load(0);
  for (Part part : kBothParts) {
    EXPECT_EQ(memory.part[index_of(part)], host.memory().data() + places[0].offset[index_of(part)]);
  }
  mover->start_save(0, Save::kUpdated);
  mover->finish_save(0);
  EXPECT_EQ(thread->stats().read_bytes, read);
  EXPECT_EQ(mover->d2h_bytes(), 0u);
  EXPECT_EQ(mover->h2d_bytes() - h2d_before, payload_bytes(shape.tiles[0], Part::kWeights)) << "the copy for compute";
}

}  // namespace
}  // namespace spillway
