// BlockFetcher and WeightPlaces over a real store and the host device, in the order that the policy of weights says.
#include <algorithm>
#include <functional>
#include <set>

#include "kernels/device.h"
#include "kernels/host_device.h"
#include "kernels/workers.h"
#include "swap/block_fetcher.h"
#include "swap/policy/weight_residency.h"
#include "swap/weight_places.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

constexpr std::uint64_t kPlaceBytes = 512 * 1024;
constexpr std::uint64_t kChunkBytes = 256 * 1024;

// An update that waits for the test.
struct Awaited final : UpdateView {
  std::set<std::uint32_t> blocks;
  bool begun() const override { return !blocks.empty(); }
  WeightsFrom weights_from(std::uint32_t block) const override {
    return blocks.contains(block) ? WeightsFrom::kUpdate : WeightsFrom::kNewest;
  }
};

// Does what the policy says, as the engine does, with fetches of a tile a block. What stands in for an update is the
// test's.
class Lender {
 public:
  std::function<void(std::uint32_t block, std::vector<FetchPiece>& pieces, std::byte* to)> fill;
  std::function<bool(std::uint32_t block, std::byte* to)> update = {};

  Lender(WeightPlaces& places, const WeightResidencyOptions& policy) : places_(places), policy_(policy, update_) {}
  ~Lender() { forget(); }

  void await(std::uint32_t block) { update_.blocks.insert(block); }
  void begin_step(std::span<const std::uint32_t> visits) {
    policy_.tell({.kind = WeightEvent::kBegin, .visits = visits});
    run(nullptr);
  }
  std::uint32_t acquire(std::uint32_t block, std::optional<std::size_t> visit, Stream& stream) {
    policy_.tell({.kind = WeightEvent::kAcquire, .block = block, .visit = visit});
    return *run(&stream);
  }
  void release(std::uint32_t place, Stream& stream) {
    policy_.tell({.kind = WeightEvent::kRelease, .place = place});
    if (!policy_.leased(place)) places_.release(place, stream);
    run(nullptr);
  }
  void forget() {
    policy_.tell({.kind = WeightEvent::kForget});
    run(nullptr);
  }
  std::byte* address(std::uint32_t place) const { return places_.memory(place).data(); }
  WeightResidency::Hits hits() const { return policy_.hits(); }

 private:
  std::optional<std::uint32_t> run(Stream* stream) {
    std::optional<std::uint32_t> lent;
    for (WeightAction action = policy_.next(); action.kind != WeightAction::kNothing; action = policy_.next()) {
      try {
        act(action);
      } catch (...) {
        policy_.tell({.kind = WeightEvent::kFailed, .place = action.place});
        throw;
      }
      if (action.kind != WeightAction::kLend) continue;
      places_.open(action.place, *stream);
      lent = action.place;
    }
    return lent;
  }
  void act(const WeightAction& action) {
    const auto& [kind, block, place] = action;
    if (kind == WeightAction::kFetch) {
      fill(block, places_.pieces(place), address(place));
      places_.start_fetch(place);
    } else if (kind == WeightAction::kUpdate) {
      places_.begin_copies(place);
      const bool brought = update(block, address(place));
      if (brought) places_.end_copies(place);
      update_.blocks.erase(block);
      policy_.tell({.kind = brought ? WeightEvent::kBrought : WeightEvent::kPassed, .block = block, .place = place});
    } else if (kind == WeightAction::kWait || kind == WeightAction::kDrain) {
      kind == WeightAction::kWait ? places_.wait_fetch(place) : places_.drain(place);
      policy_.tell({.kind = WeightEvent::kArrived, .place = place});
    }
  }

  WeightPlaces& places_;
  Awaited update_;
  WeightResidency policy_;
};

class Fetch : public ::testing::Test {
 protected:
  void SetUp() override {
    store = TileStore::create(directory.path(), three_tiles(), false);
    device->register_host(host.memory());
    thread = thread_for(*store, host);
    write_tiles(*store, three_tiles(), *thread, host, 5, true);
    store->commit(0, {}, *thread, host.memory());
    fetcher = std::make_unique<BlockFetcher>(*thread, *device, *h2d, host.memory().first(2 * kChunkBytes), kChunkBytes,
                                             [](std::uint32_t tile) { return "tile number " + std::to_string(tile); });
  }
  void TearDown() override {
    h2d->synchronize();
    compute->synchronize();
    places.reset();
    memory.reset();
    fetcher.reset();
    thread.reset();
  }

  // Block b is tile b. Block 0 is by far the largest; only the first place has room for it.
  void make_places(std::uint32_t count, bool poison = false, std::uint64_t prefetch_bytes = UINT64_MAX,
                   std::uint64_t reuse_bytes = UINT64_MAX) {
    places.reset();
    memory.reset();
    WeightPlacesOptions options{.places = {}, .max_pieces = 1, .max_granules = 16, .poison_released = poison};
    WeightResidencyOptions policy{.block_bytes = {},
                                  .place_bytes = {},
                                  .reuse_bytes = reuse_bytes,
                                  .prefetch_bytes = prefetch_bytes,
                                  .poison_released = poison};
    for (std::uint32_t p = 0; p < count; ++p) {
      options.places.push_back(device->hbm().subspan(p * kPlaceBytes, p == 0 ? kPlaceBytes : kPlaceBytes / 16));
      policy.place_bytes.push_back(options.places.back().size());
    }
    for (const TileShape& tile : three_tiles().tiles) policy.block_bytes.push_back(payload_bytes(tile, Part::kWeights));
    block_bytes = policy.block_bytes;
    place_bytes = policy.place_bytes;
    memory = std::make_unique<WeightPlaces>(*device, *h2d, fetcher.get(), options);
    places = std::make_unique<Lender>(*memory, policy);
    places->fill = [this](std::uint32_t block, std::vector<FetchPiece>& pieces, std::byte* to) {
      if (block == unsaved) throw Error(Code::kIo, {"tile", "could not be written", EIO, "check the drive"});
      fetched.push_back(block);
      const TileStore::Slot slot = store->readable(block);
      pieces.push_back({.tile = block,
                        .to = to,
                        .payload_bytes = payload_bytes(three_tiles().tiles[block], Part::kWeights),
                        .extent = slot.extent[0],
                        .checksum = slot.checksum[0]});
    };
    places->update = [this](std::uint32_t block, std::byte* to) { return deliver(block, to); };
  }
  // Stands in for an update: the place gets the block's number in every byte, unless it is the one that is refused.
  bool deliver(std::uint32_t block, std::byte* to) {
    delivered.push_back(block);
    if (block == refused) return false;
    device->fill_async(to, static_cast<std::byte>(block), 1000, *h2d);
    return true;
  }
  void expect_delivered(std::uint32_t block, const std::byte* at) {
    compute->synchronize();
    EXPECT_TRUE(std::all_of(at, at + 1000, [block](std::byte b) { return b == static_cast<std::byte>(block); }));
  }
  void expect_weights(std::uint32_t block, const std::byte* at) {
    compute->synchronize();
    const std::uint64_t bytes = payload_bytes(three_tiles().tiles[block], Part::kWeights);
    const Extent extent = store->readable(block).extent[0];
    const auto stored = host.memory().subspan(2 << 20, extent.bytes);
    store->files().read_at(extent.offset, stored);
    EXPECT_EQ(std::memcmp(stored.data(), at, bytes), 0) << "block " << block;
  }

  StoreDirectory directory;
  HostArena host{4 << 20, kPinnedArena};
  std::unique_ptr<TileStore> store;
  std::unique_ptr<HostWorkers> workers = create_workers(2);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = 3 * kPlaceBytes}, *workers);
  std::unique_ptr<Stream> compute = device->create_stream("compute"), h2d = device->create_stream("h2d");
  std::unique_ptr<StoreThread> thread;
  std::unique_ptr<BlockFetcher> fetcher;
  std::unique_ptr<WeightPlaces> memory;
  std::unique_ptr<Lender> places;
  std::vector<std::uint64_t> block_bytes, place_bytes;
  std::vector<std::uint32_t> delivered, fetched;
  std::uint32_t refused = UINT32_MAX, unsaved = UINT32_MAX;
};

TEST_F(Fetch, BlocksArriveWholeInVisitOrderWithOnePlaceOrMore) {
  const std::vector<std::uint32_t> visits = {0, 1, 2, 1, 0, 2};
  for (std::uint32_t count : {1u, 2u, 3u}) {
    make_places(count);
    for (int step = 0; step < 3; ++step) {
      places->begin_step(visits);
      for (std::size_t v = 0; v < visits.size(); ++v) {
        const std::uint32_t place = places->acquire(visits[v], v, *compute);
        expect_weights(visits[v], places->address(place));
        places->release(place, *compute);
      }
    }
    compute->synchronize();
    places->forget();
  }
}

TEST_F(Fetch, AVisitThatThePlanDidNotExpectIsServed) {
  make_places(2);
  places->begin_step(std::vector<std::uint32_t>{0, 1, 2});
  for (std::uint32_t block : {2u, 2u, 0u, 1u, 0u}) {
    const std::uint32_t place = places->acquire(block, std::nullopt, *compute);
    expect_weights(block, places->address(place));
    places->release(place, *compute);
  }
}

// The first visit of a block takes its weights from the update, later ones those that were written; nothing is fetched
// before its update was made, however early a place for it comes free.
TEST_F(Fetch, WeightsWhoseUpdateIsAwaitedComeFromIt) {
  const std::vector<std::uint32_t> visits = {0, 1, 2, 2, 1, 0};
  for (std::uint32_t count : {1u, 2u, 3u}) {
    make_places(count);
    const auto plan = assign_places(visits, block_bytes, place_bytes);
    for (const std::uint32_t not_delivered : {UINT32_MAX, 1u}) {
      for (const std::uint32_t block : {0u, 1u, 2u}) places->await(block);
      refused = not_delivered;
      delivered.clear();
      places->begin_step(visits);
      for (std::size_t v = 0; v < visits.size(); ++v) {
        const std::uint32_t place = places->acquire(visits[v], v, *compute);
        const bool from_update = v < 3 && visits[v] != refused;
        const bool resident = !plan[v].fetch;  // still what the first visit brought
        if (from_update || (resident && visits[v] != refused)) {
          expect_delivered(visits[v], places->address(place));
        } else {
          expect_weights(visits[v], places->address(place));
        }
        places->release(place, *compute);
      }
      EXPECT_EQ(delivered, (std::vector<std::uint32_t>{0, 1, 2}));
    }
    compute->synchronize();
    places->forget();
  }
}

// A block that is there, but whose place another one takes before it is wanted again, is fetched as soon as that is
// done.
TEST_F(Fetch, ABlockThatWillHaveLostItsPlaceIsFetchedAhead) {
  make_places(2);
  const std::vector<std::uint32_t> visits = {1, 2, 0, 0, 2, 1};
  for (const std::uint32_t block : {0u, 1u, 2u}) places->await(block);
  places->begin_step(visits);
  for (std::size_t v = 0; v < visits.size(); ++v) {
    if (v == 4) {
      EXPECT_EQ(fetched, (std::vector<std::uint32_t>{2, 1}));
    }
    const std::uint32_t place = places->acquire(visits[v], v, *compute);
    if (v < 4) {
      expect_delivered(visits[v], places->address(place));
    } else {
      expect_weights(visits[v], places->address(place));
    }
    places->release(place, *compute);
  }
  EXPECT_EQ(fetched, (std::vector<std::uint32_t>{2, 1}));
}

TEST_F(Fetch, BlocksAreFetchedAheadUntilTheLimitIsReached) {
  make_places(3);
  const std::uint64_t sums[] = {0, block_bytes[0], block_bytes[0] + block_bytes[1],
                                block_bytes[0] + block_bytes[1] + block_bytes[2]};
  const std::pair<std::uint64_t, int> limits[] = {{0, 0},       {1, 1},           {sums[1], 1},   {sums[1] + 1, 2},
                                                  {sums[2], 2}, {sums[2] + 1, 3}, {UINT64_MAX, 3}};
  for (const auto& [limit, blocks] : limits) {
    make_places(3, false, limit);
    const std::uint64_t before = fetcher->copied_bytes();
    places->begin_step(std::vector<std::uint32_t>{0, 1, 2});
    places->forget();
    EXPECT_EQ(fetcher->copied_bytes() - before, sums[blocks]) << limit;
    for (std::uint32_t block : {0u, 1u, 2u}) {
      const std::uint32_t place = places->acquire(block, block, *compute);
      expect_weights(block, places->address(place));
      places->release(place, *compute);
    }
  }
}

TEST_F(Fetch, HitsAreVisitsOfBlocksThatStayed) {
  const std::vector<std::uint32_t> visits = {0, 1, 2, 2, 1, 0};
  for (const std::uint64_t reuse : {std::uint64_t{0}, std::uint64_t{1}, UINT64_MAX}) {
    make_places(3, false, UINT64_MAX, reuse);
    const auto plan = assign_places(visits, block_bytes, place_bytes, {.owners = {}, .reuse_bytes = reuse});
    const auto hits = static_cast<std::uint64_t>(std::ranges::count(plan, false, &VisitPlace::fetch));
    EXPECT_EQ(hits, reuse == 0 ? 0u : reuse == 1 ? 1u : 3u);
    for (int step = 0; step < 3; ++step) {
      const std::uint64_t before = fetcher->copied_bytes();
      std::uint64_t fetched = 0;
      places->begin_step(visits);
      for (std::size_t v = 0; v < visits.size(); ++v) {
        const std::uint32_t place = places->acquire(visits[v], v, *compute);
        expect_weights(visits[v], places->address(place));
        places->release(place, *compute);
        fetched += plan[v].fetch ? block_bytes[visits[v]] : 0;
      }
      EXPECT_EQ(places->hits().visits, visits.size());
      EXPECT_EQ(places->hits().hits, hits) << "step " << step;
      EXPECT_EQ(fetcher->copied_bytes() - before, fetched);
    }
  }
}

// Where its weights are is known once what was updated of them is saved, and that may fail.
TEST_F(Fetch, ABlockThatCannotBeFetchedIsNotUnderWay) {
  make_places(2);
  unsaved = 1;
  EXPECT_THROW(places->begin_step(std::vector<std::uint32_t>{0, 1}), Error);
  places->forget();
  unsaved = UINT32_MAX;
  expect_weights(1, places->address(places->acquire(1, 1, *compute)));
}

TEST_F(Fetch, AFlippedBitOnTheDriveNeverOpensALease) {
  directory.damage(store->readable(0).extent[0].offset + 300 * 1024);  // in its second granule
  make_places(2);
  places->begin_step(std::vector<std::uint32_t>{1, 0});
  places->release(places->acquire(1, 0, *compute), *compute);
  try {
    places->acquire(0, 1, *compute);
    FAIL() << "damaged weights were handed out";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_NE(std::string(error.what()).find("tile number 0 at offset"), std::string::npos) << error.what();
  }
}

TEST_F(Fetch, AReleasedLeaseIsFilledWithNaNWhenAsked) {
  make_places(2, true);
  places->begin_step(std::vector<std::uint32_t>{0, 1});
  const std::uint32_t place = places->acquire(0, 0, *compute);
  places->release(place, *compute);
  compute->synchronize();
  const auto bytes = std::span(places->address(place), 1000);
  EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xff}; }));
}

// A place is written again only once the work that reads it has run, however late that is.
TEST_F(Fetch, APlaceIsNotOverwrittenWhileEnqueuedWorkStillReadsIt) {
  make_places(1);
  places->begin_step(std::vector<std::uint32_t>{0, 1});
  std::atomic<bool> go = false;
  std::vector<std::byte> seen(1000);
  const std::uint32_t place = places->acquire(0, 0, *compute);
  compute->launch([&go, at = places->address(place), out = seen.data()](HostWorkers&) {
    while (!go) std::this_thread::yield();
    std::memcpy(out, at, 1000);
  });
  places->release(place, *compute);  // starts the fetch of block 1 into the same place
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  go = true;
  const std::uint32_t next = places->acquire(1, 1, *compute);
  expect_weights(1, places->address(next));
  const Extent extent = store->readable(0).extent[0];
  const auto stored = host.memory().subspan(2 << 20, extent.bytes);
  store->files().read_at(extent.offset, stored);
  EXPECT_EQ(std::memcmp(stored.data(), seen.data(), seen.size()), 0);
}

}  // namespace
}  // namespace spillway
