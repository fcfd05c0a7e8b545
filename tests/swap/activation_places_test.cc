// ActivationPlaces over a real store and the host device: every read sees the last write, wherever the bytes were
// meanwhile.
#include "swap/activation_places.h"
#include "kernels/host_device.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/workers.h"
#include "tests/seed.h"
#include "tests/swap/activation_uses.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

constexpr std::uint64_t kChunkBytes = kGranuleBytes;
constexpr std::uint64_t kPlaceBytes = 320 * 1024;
constexpr std::uint32_t kActivations = 8;

// What version v of an activation holds: these bytes from v on, v below kVersions.
constexpr std::uint32_t kVersions = 251;
const std::vector<std::byte> kContent = [] {
  std::vector<std::byte> content(kPlaceBytes + kVersions);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i % kVersions);
  return content;
}();

enum class Homes { kHost, kNvme, kBoth };

class Activations : public ::testing::Test {
 protected:
  void SetUp() override {
    random.seed(test_seed());
    StoreShape shape = three_tiles();
    shape.scratch_bytes = kActivations * (kPlaceBytes + kExtentAlignment);
    store = TileStore::create(directory.path(), shape, false);
    device->register_host(host.memory());
    thread = thread_for(*store, host);
    for (std::uint32_t a = 0; a < kActivations; ++a) bytes.push_back(1000 + random() % (kPlaceBytes - 1000));
  }
  void TearDown() override {
    compute->synchronize();
    places.reset();
    fetcher.reset();
    spiller.reset();
    thread.reset();
  }

  void make(const std::vector<ActivationUse>& uses, std::uint32_t held, std::uint32_t count, Homes where,
            bool any_plan = false) {
    places.reset();
    const std::size_t chunks = least_chunks + random() % 3;
    fetcher =
        std::make_unique<BlockFetcher>(*thread, *device, *h2d, host.memory().first(chunks * kChunkBytes), kChunkBytes,
                                       [](std::uint32_t a) { return "activation number " + std::to_string(a); });
    spiller = std::make_unique<BlockSpiller>(
        *thread, *device, *d2h, host.memory().subspan(4 * kChunkBytes, chunks * kChunkBytes), kChunkBytes, count);
    ActivationPlacesOptions options{.places = {}, .bytes = bytes, .uses = uses, .plan = {}, .homes = {}};
    options.plan = any_plan ? random_plan(random, uses, held, count) : assign_activations(uses, held, count);
    for (std::uint32_t p = 0; p < count; ++p) {
      options.places.push_back(device->hbm().subspan(p * kPlaceBytes, kPlaceBytes));
    }
    for (std::uint32_t a = 0; a < kActivations; ++a) {
      const std::uint64_t padded = kPlaceBytes + kExtentAlignment;
      ActivationHome home;
      if (where == Homes::kHost || (where == Homes::kBoth && a % 2 == 0)) {
        home.host = host.memory().data() + (2 << 20) + a * kPlaceBytes;
      } else {
        home.extent = {.offset = store->layout().scratch_offset + a * padded,
                       .bytes = align_up(bytes[a], kExtentAlignment)};
      }
      options.homes.push_back(home);
    }
    places = std::make_unique<ActivationPlaces>(*device, fetcher.get(), spiller.get(), options);
  }

  // Work of a use, as a model enqueues it: what is read must be what was written last.
  void enqueue(const ActivationUse& use, std::byte* at) {
    const std::byte* before = kContent.data() + version[use.activation];
    if (use.access != Access::kRead) version[use.activation] = static_cast<std::uint8_t>(random() % kVersions);
    const std::byte* after = kContent.data() + version[use.activation];
    compute->launch([at, count = bytes[use.activation], use, before, after, wrong = &wrong](HostWorkers&) {
      if (use.access != Access::kWrite) *wrong += std::memcmp(at, before, count) != 0;
      if (use.access != Access::kRead) std::memcpy(at, after, count);
    });
  }
  // The uses in order, up to `held` of them leased at a time.
  void run(const std::vector<ActivationUse>& uses, std::uint32_t held) {
    std::vector<std::uint32_t> leased;
    for (const ActivationUse& use : uses) {
      if (leased.size() == held) {
        places->release(leased.front(), *compute);
        leased.erase(leased.begin());
      }
      leased.push_back(places->acquire(use.activation, use.access, *compute));
      enqueue(use, places->address(leased.back()));
    }
    for (std::uint32_t place : leased) places->release(place, *compute);
  }
  void expect_refused(std::uint32_t activation, Access access) {
    try {
      places->release(places->acquire(activation, access, *compute), *compute);
      ADD_FAILURE() << "activation " << activation << " was handed out";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument) << error.what();
    }
  }
  void expect_nothing_wrong() {
    compute->synchronize();
    EXPECT_EQ(wrong, 0u);
  }

  StoreDirectory directory;
  HostArena host{8 << 20, kPinnedArena};
  std::mt19937_64 random;
  std::unique_ptr<TileStore> store;
  std::unique_ptr<HostWorkers> workers = create_workers(2);
  std::unique_ptr<Device> device = create_host_device({.hbm_bytes = kActivations * kPlaceBytes}, *workers);
  std::unique_ptr<Stream> compute = device->create_stream("compute"), h2d = device->create_stream("h2d"),
                          d2h = device->create_stream("d2h");
  std::unique_ptr<StoreThread> thread;
  std::unique_ptr<BlockFetcher> fetcher;
  std::unique_ptr<BlockSpiller> spiller;
  std::unique_ptr<ActivationPlaces> places;
  std::vector<std::uint64_t> bytes;
  std::size_t least_chunks = 1;
  std::uint8_t version[kActivations] = {};
  std::uint64_t wrong = 0;  // reads
};

TEST_F(Activations, EveryReadSeesTheLastWriteInRandomOrdersAndBudgets) {
  for (int round = 0; round < 60 && !::testing::Test::HasFailure(); ++round) {
    const auto uses = round % 3 == 0 ? transformer_uses(3, 2) : random_uses(random, kActivations);
    const auto held = static_cast<std::uint32_t>(1 + random() % 3);
    const auto count = held + static_cast<std::uint32_t>(random() % 4);
    make(uses, held, count, static_cast<Homes>(round % 3), round % 2 == 0);
    for (int step = 0; step < 2; ++step) {
      places->begin_step();
      run(uses, held);
    }
    expect_nothing_wrong();
  }
}

TEST_F(Activations, WithAPlaceForEachTheyMayComeInAnyOrder) {
  make({}, 1, kActivations, Homes::kHost);
  places->begin_step();
  for (int i = 0; i < 2; ++i) run(random_uses(random, kActivations), 2);
  expect_nothing_wrong();
  EXPECT_EQ(spiller->copied_bytes() + fetcher->copied_bytes(), 0u);
}

TEST_F(Activations, AUseOutOfOrderIsRefusedAndChangesNothing) {
  const auto uses = transformer_uses(3, 2);
  make(uses, 2, 4, Homes::kNvme);
  places->begin_step();
  for (std::size_t u = 0; u < uses.size(); ++u) {
    for (std::uint32_t a = 0; a < kActivations; ++a) {
      for (Access access : {Access::kRead, Access::kWrite, Access::kUpdate}) {
        const auto is = [&](const ActivationUse& use) { return use.activation == a && use.access == access; };
        if (!is(uses[u]) && !is(uses[0])) expect_refused(a, access);
      }
    }
    const std::uint32_t place = places->acquire(uses[u].activation, uses[u].access, *compute);
    enqueue(uses[u], places->address(place));
    places->release(place, *compute);
  }
  expect_refused(uses[1].activation, uses[1].access);  // after the end
  expect_nothing_wrong();
}

// As an evaluation of the forward part between two steps makes them.
TEST_F(Activations, AStepMayBeBegunAgainFromItsFirstUse) {
  const auto uses = transformer_uses(3, 2);
  make(uses, 2, 4, Homes::kNvme);
  places->begin_step();
  for (std::size_t part : {3u, 9u, 14u, 20u}) {
    run({uses.begin(), uses.begin() + static_cast<std::ptrdiff_t>(part)}, 2);
    run(uses, 2);
  }
  expect_nothing_wrong();
}

TEST_F(Activations, HoldingMoreThanDescribedIsRefused) {
  const auto uses = transformer_uses(3, 2);
  make(uses, 2, 2, Homes::kHost);
  places->begin_step();
  std::uint32_t leased[3];
  for (std::size_t u = 0; u < 3; ++u) {
    leased[u] = places->acquire(uses[u].activation, uses[u].access, *compute);
    enqueue(uses[u], places->address(leased[u]));
    if (u != 1) places->release(leased[u], *compute);
  }
  expect_refused(uses[3].activation, uses[3].access);  // it is to have the place of the second
  places->release(leased[1], *compute);
  run({uses.begin() + 3, uses.end()}, 2);
  expect_nothing_wrong();
}

// What had been copied of it lands before the place is used again, however late that is.
TEST_F(Activations, AFetchThatFailedAndWasNotUsedOverwritesNothing) {
  bytes[0] = kPlaceBytes;  // two granules: one is copied
  least_chunks = 2;
  const std::vector<ActivationUse> uses = {{.activation = 0, .access = Access::kWrite},
                                           {.activation = 1, .access = Access::kWrite},
                                           {.activation = 0, .access = Access::kRead}};
  make(uses, 1, 1, Homes::kNvme);
  places->begin_step();
  run({uses[0]}, 1);
  const std::uint64_t extent = store->layout().scratch_offset;
  const auto stored = host.memory().subspan(2 << 20, kPlaceBytes);
  do {
    store->files().read_at(extent, stored);
  } while (std::memcmp(stored.data(), kContent.data() + version[0], kPlaceBytes) != 0);
  directory.damage(extent + kGranuleBytes);
  h2d->launch([](HostWorkers&) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
  run({uses[1]}, 1);  // the first one starts to come back
  places->begin_step();
  run({uses[0]}, 1);
  const std::byte* const place = places->address(0);
  compute->synchronize();
  h2d->synchronize();
  EXPECT_EQ(std::memcmp(place, kContent.data() + version[0], kPlaceBytes), 0);
}

TEST_F(Activations, AFlippedBitOnTheDriveIsNeverUsed) {
  const auto uses = transformer_uses(3, 2);
  make(uses, 2, 4, Homes::kNvme);
  places->begin_step();
  try {
    for (const ActivationUse& use : uses) {
      const std::uint32_t place = places->acquire(use.activation, use.access, *compute);
      enqueue(use, places->address(place));
      places->release(place, *compute);
      compute->synchronize();
      d2h->synchronize();
      for (std::uint32_t a = 0; a < kActivations; ++a) {
        directory.damage(store->layout().scratch_offset + a * (kPlaceBytes + kExtentAlignment) + random() % 1000);
      }
    }
    FAIL() << "damaged bytes were handed out";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCorrupt);
    EXPECT_NE(std::string(error.what()).find("activation number"), std::string::npos) << error.what();
  }
  expect_nothing_wrong();
}

}  // namespace
}  // namespace spillway
