#include "swap/store_thread.h"

#include <atomic>
#include <thread>

#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

struct OpenStore {
  StoreDirectory directory;
  HostArena arena{4 << 20, kPinnedArena};
  std::unique_ptr<TileStore> store = TileStore::create(directory.path(), three_tiles(), false);
  std::unique_ptr<StoreThread> thread = thread_for(*store, arena);
};

TEST(StoreThread, RequestsFromManyThreadsEachCompleteOnce) {
  OpenStore open;
  std::atomic<int> completed = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      IoBatch batch(*open.thread);
      for (int round = 0; round < 100; ++round) {
        for (int i = 0; i < 20; ++i) {
          batch.add({.op = IoOp::kRead,
                     .offset = static_cast<std::uint64_t>(i) * 4096,
                     .buffer = open.arena.memory().data() + (t * 20 + i) * 4096,
                     .bytes = 4096});
        }
        batch.wait();
        EXPECT_TRUE(batch.done());
        completed += 20;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(completed, 4 * 100 * 20);
  EXPECT_EQ(open.thread->stats().read_bytes, 4u * 100 * 20 * 4096);
}

TEST(StoreThread, AFailedRequestNamesFileOffsetAndErrno) {
  OpenStore open;
  IoBatch batch(*open.thread);
  const std::uint64_t end = open.store->layout().total_bytes;
  batch.add({.op = IoOp::kRead, .offset = end + 65536, .buffer = open.arena.memory().data(), .bytes = 65536});
  try {
    batch.wait();
    FAIL() << "a read beyond the end succeeded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kIo);
    EXPECT_EQ(error.parts().errno_value, ENODATA);
    EXPECT_NE(std::string(error.what()).find(open.directory.file().string()), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(std::to_string(end + 65536)), std::string::npos) << error.what();
  }
  // The failure was of that batch alone.
  batch.add({.op = IoOp::kRead, .offset = 0, .buffer = open.arena.memory().data(), .bytes = 65536});
  batch.wait();
}

struct Waker : IoHandler {
  void on_io(const IoRequest&, const IoCompletion&) override {}
  void on_wake() override { ++wakes; }
  std::atomic<int> wakes = 0;
};

TEST(StoreThread, AWakeIsDeliveredAndARetiredHandlerIsLeftAlone) {
  OpenStore open;
  for (int round = 0; round < 200; ++round) {
    auto waker = std::make_unique<Waker>();
    open.thread->wake(*waker);
    if (round % 2 == 0) {
      while (waker->wakes == 0) std::this_thread::yield();
    }
    open.thread->wake(*waker);
    open.thread->retire(*waker);
    waker.reset();  // a wake that came now would touch freed memory: the sanitizers would tell
  }
}

// A handler that says that all is done while it still runs. Its owner may then retire and destroy it.
struct EarlyHandler : IoHandler {
  void on_io(const IoRequest&, const IoCompletion&) override {
    done->store(true);
    for (int i = 0; i < 1000; ++i) ++after;
    if (after == 1000) finished->store(true);
  }
  std::atomic<bool>* done = nullptr;
  std::atomic<bool>* finished = nullptr;
  std::atomic<int> after = 0;
};

TEST(StoreThread, RetireWaitsForACompletionThatIsBeingDelivered) {
  OpenStore open;
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> done = false, finished = false;
    auto handler = std::make_unique<EarlyHandler>();
    handler->done = &done;
    handler->finished = &finished;
    open.thread->post({.op = IoOp::kRead, .offset = 0, .buffer = open.arena.memory().data(), .bytes = 4096}, *handler);
    while (!done) std::this_thread::yield();
    open.thread->retire(*handler);
    ASSERT_TRUE(finished) << "round " << round;
    handler.reset();
  }
}

}  // namespace
}  // namespace spillway
