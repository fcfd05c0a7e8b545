// A queue that many threads use: what they submit is done once each, whoever waits; what cannot be is an error.
#include "spillway/shared_io_queue.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "aio/shared_queue.h"
#include "queue_fixture.h"
#include "tests/error_of.h"
#include "tests/sanitizer.h"

namespace spillway::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kUnit = 64 * kKiB;

class SharedQueueTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
  }
  SharedIoQueue& open(IoQueueOptions options = {}) {
    options.engine = GetParam();
    auto made = SharedIoQueue::create(options, pointers_, {});
    SharedIoQueue& queue = *made;
    queue_ = std::move(made);
    return queue;
  }
  // As many writes as the memory has units.
  void submit_writes(Memory& memory) {
    for (std::uint64_t i = 0; i < memory.span().size() / kUnit; ++i) {
      queue_->submit(
          {.op = IoOp::kWrite, .offset = i * kUnit, .buffer = memory.data() + i * kUnit, .bytes = kUnit, .tag = i});
    }
  }
};

TEST_P(SharedQueueTest, ItIsAQueueAsAnyOther) {
  open_files(1, 64 * kUnit);
  open({.block_bytes = kUnit});
  Memory memory(64 * kUnit);
  expect_transfers_work(memory);
  EXPECT_EQ(queue_->stats().read_bytes, 64 * kUnit);
  EXPECT_EQ(queue_->stats().syncs, 1u);
  EXPECT_EQ(queue_->describe().rfind(name_of(GetParam()), 0), 0u) << queue_->describe();
  IoCompletion out[1];
  EXPECT_TRUE(queue_->wait(out, -1).empty());  // nothing is pending, so nothing comes
}

TEST_P(SharedQueueTest, ManyThreadsSubmitAndMoreWaitAndEachRequestIsDoneOnce) {
  constexpr std::uint64_t kThreads = 6, kEach = 60;
  open_files(2, kThreads * kEach * 4 * kKiB);
  open({.depth = 8, .max_requests = 64});
  Memory memory(kThreads * kEach * 4 * kKiB), back(kThreads * kEach * 4 * kKiB);
  memory.fill_pattern(5);
  std::vector<std::atomic<int>> times(kThreads * kEach);
  std::atomic<std::uint64_t> taken = 0, errors = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = t * kEach; i < (t + 1) * kEach;) {
        try {
          queue_->submit({.op = IoOp::kWrite,
                          .file = static_cast<std::uint32_t>(i % 2),
                          .offset = i * 4 * kKiB,
                          .buffer = memory.data() + i * 4 * kKiB,
                          .bytes = 4 * kKiB,
                          .tag = i});
          ++i;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Code::kBusy) << error.what();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    });
  }
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      IoCompletion out[5];
      while (taken < kThreads * kEach) {
        for (const IoCompletion& done : queue_->wait(out, 0.01)) {
          ++times[done.tag];
          ++taken;
          errors += done.error != 0;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(std::ranges::all_of(times, [](const auto& count) { return count == 1; }));
  EXPECT_EQ(errors, 0u);
  EXPECT_EQ(queue_->pending(), 0u);
  for (std::uint64_t i = 0; i < kThreads * kEach; ++i)
    files_[i % 2]->read_at(i * 4 * kKiB, back.span(i * 4 * kKiB, 4 * kKiB));
  EXPECT_TRUE(same_bytes(memory.span(), back.span()));
}

TEST_P(SharedQueueTest, FilesAndRegionsComeAndGoWhileOthersSubmit) {
  open_files(1, 16 * kUnit);
  open({.block_bytes = kUnit, .depth = 4, .max_files = 2, .max_regions = 1});
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> moved = 0;
  std::thread other([&] {
    Memory memory(kUnit);
    IoCompletion out[1];
    while (!stop) {
      queue_->submit({.op = IoOp::kWrite, .offset = moved % 16 * kUnit, .buffer = memory.data(), .bytes = kUnit});
      while (queue_->wait(out, -1).empty()) {
      }
      ++moved;
    }
  });
  File later = File::open(dir_ / "later", kNewFile);
  later.preallocate(kUnit);
  Memory region(kUnit);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(queue_->add_file(later), 1u);
    queue_->add_region(region.span());
    EXPECT_EQ(error_of([&] { queue_->add_region(region.span()); }).code(), Code::kInvalidArgument);
    EXPECT_EQ(error_of([&] { queue_->add_file(later); }).code(), Code::kInvalidArgument);
    queue_->remove_file(1);
    EXPECT_THAT(error_of([&] { queue_->submit({.op = IoOp::kSync, .file = 1}); }).what(),
                HasSubstr("request of file 1: no such file in this queue"));
    queue_->remove_region(region.data());
    for (const std::uint64_t before = moved; moved == before;) std::this_thread::yield();
  }
  stop = true;
  other.join();
}

TEST_P(SharedQueueTest, WhatCannotBeIsAnErrorAndTheQueueGoesOn) {
  open_files(1, 4 * kUnit);
  open({.max_requests = 2});
  Memory memory(4 * kUnit);
  const auto refused = [&](IoRequest request, const char* why) {
    const Error error = error_of([&] { queue_->submit(request); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(why));
  };
  const IoRequest good{.op = IoOp::kWrite, .buffer = memory.data(), .bytes = kUnit};
  const auto with = [&](auto change) {
    IoRequest request = good;
    change(request);
    return request;
  };
  refused(with([](IoRequest& r) { r.offset = 7; }), "file0: offset and length must be multiples");
  refused(with([](IoRequest& r) { r.bytes = 7; }), "offset and length must be multiples");
  if (files_[0]->memory_alignment() > 1) refused(with([](IoRequest& r) { ++r.buffer; }), "address must be a multiple");
  refused(with([](IoRequest& r) { r.buffer = nullptr; }), "needs bytes and a buffer");
  refused(with([](IoRequest& r) { r.offset = ~0ull - kUnit + 1; }), "offset out of range");
  refused(with([](IoRequest& r) { r.file = 9; }), "request of file 9: no such file");
  refused(with([](IoRequest& r) { r.file = kStripedSpace; }), "request of the striped space: no such file");
  refused(with([](IoRequest& r) { r.op = static_cast<IoOp>(9); }), "no such operation");
  refused(with([](IoRequest& r) { r.least_bytes = 1; }), "least_bytes is a part of a read");
  refused(with([](IoRequest& r) { r.op = IoOp::kSync; }), "a sync moves no bytes");
  queue_->submit(good);
  queue_->submit(good);
  const Error full = error_of([&] { queue_->submit(good); });
  EXPECT_EQ(full.code(), Code::kBusy);
  EXPECT_THAT(full.what(), HasSubstr("holds 2 requests, as many as it may; take completions first"));
  EXPECT_EQ(error_of([&] { queue_->wait({}, 0); }).code(), Code::kInvalidArgument);
  collect(2);
  expect_transfers_work(memory);
}

TEST_P(SharedQueueTest, AWakeEndsOneWait) {
  open_files(1, kUnit);
  open();
  IoCompletion out[1];
  queue_->wake();  // before the wait
  EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
  std::atomic<int> ended = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      IoCompletion room[1];
      EXPECT_TRUE(queue_->wait(room, kUntilWoken).empty());
      ++ended;
    });
  }
  for (int i = 1; i <= 2; ++i) {
    queue_->wake();
    while (ended < i) std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(queue_->wait(out, 0.02).empty());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(20));
}

TEST_P(SharedQueueTest, ClosedWithWorkUnderWayItEndsEveryRequest) {
  open_files(1, 256 * kUnit);
  SharedIoQueue& queue = open({.block_bytes = kUnit, .depth = 2, .max_requests = 256});
  Memory memory(256 * kUnit), back(kUnit);
  memory.fill_pattern(3);
  submit_writes(memory);
  std::thread waits([&] {
    IoCompletion room[1];
    while (queue_->wait(room, kUntilWoken).empty()) {
    }
  });
  queue.close();
  waits.join();
  EXPECT_THAT(error_of([&] { queue_->submit({.op = IoOp::kSync}); }).what(), HasSubstr("I/O queue: is closed"));
  EXPECT_THAT(error_of([&] { queue_->add_region(memory.span()); }).what(), HasSubstr("is closed"));
  std::uint64_t ended = 1, cancelled = 0;
  IoCompletion out[16];
  for (auto some = queue_->wait(out, -1); !some.empty(); some = queue_->wait(out, -1)) {
    for (const IoCompletion& done : some) {
      ++ended;
      if (done.error == ECANCELED) {
        ++cancelled;
        EXPECT_EQ(done.error_offset, done.tag * kUnit);
        continue;
      }
      ASSERT_EQ(done.error, 0);
      files_[0]->read_at(done.tag * kUnit, back.span());
      EXPECT_TRUE(same_bytes(back.span(), memory.span(done.tag * kUnit, kUnit)));
    }
  }
  EXPECT_EQ(ended, 256u);
  EXPECT_EQ(queue_->pending(), 0u);
  EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
  queue.close();  // again
}

TEST_P(SharedQueueTest, DestroyedItSaysWhatNobodyLearned) {
  open_files(1, kUnit);
  open({.depth = 1});
  Memory memory(kUnit);
  CapturedLog log;
  queue_->submit({.op = IoOp::kRead, .offset = kGiB, .buffer = memory.data(), .bytes = kUnit});  // beyond the end
  while (queue_->stats().busy_seconds == 0) std::this_thread::yield();
  queue_.reset();
  EXPECT_EQ(log.count("I/O queue: 1 requests failed, and nobody took their completions; the first: " +
                      files_[0]->path().string() + ": read of 65536 bytes at offset 1073741824 (No data available)"),
            1u)
      << log.all();
}

// Breaks when it is told to, once, and then lets go of what is in flight.
class BreakingEngine final : public IoEngine {
 public:
  BreakingEngine(std::unique_ptr<IoEngine> inner, std::atomic<bool>& breaks)
      : inner_(std::move(inner)), breaks_(breaks) {}
  std::size_t submit(std::span<const IoPiece> pieces) override { return inner_->submit(pieces); }
  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    if (breaks_.exchange(false)) throw Error(Code::kIo, {"engine", "broke", 0, "get another"});
    return inner_->reap(out, timeout_seconds);
  }
  void wake() noexcept override { inner_->wake(); }
  std::string describe() const override { return inner_->describe(); }
  void set_file(std::uint32_t index, const File* file) override { inner_->set_file(index, file); }
  bool add_region(std::span<std::byte> region) override { return inner_->add_region(region); }
  void remove_region(std::span<std::byte> region) override { inner_->remove_region(region); }

 private:
  std::unique_ptr<IoEngine> inner_;
  std::atomic<bool>& breaks_;
};

TEST_P(SharedQueueTest, WhenTheEngineBreaksEveryRequestEndsAndAllCallsSayWhy) {
  open_files(1, 16 * kUnit);
  std::atomic<bool> breaks = false;
  const IoQueueOptions options{.block_bytes = kUnit, .depth = 2};
  queue_ = make_shared_queue(options, pointers_, [&] {
    auto engine = make_engine(GetParam(), {.depth = 2, .block_bytes = kUnit, .files = pointers_, .max_files = 1});
    return make_queue(options, pointers_, std::make_unique<BreakingEngine>(std::move(engine), breaks));
  });
  Memory memory(16 * kUnit);
  expect_transfers_work(memory);
  std::thread waits([&] {
    std::set<std::uint64_t> tags;
    IoCompletion out[4];
    try {
      for (;;) {
        for (const IoCompletion& done : queue_->wait(out, kUntilWoken)) {
          EXPECT_TRUE(done.error == 0 || done.error == EIO) << done.error;
          tags.insert(done.tag);
        }
      }
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("engine: broke"));
    }
    EXPECT_EQ(tags.size(), 16u);  // each before the error
  });
  submit_writes(memory);
  breaks = true;
  queue_->wake();
  try {  // by which its thread looks at the engine once more
    queue_->add_region(memory.span());
  } catch (const Error&) {
  }
  waits.join();
  EXPECT_THAT(error_of([&] { queue_->submit({.op = IoOp::kSync}); }).what(), HasSubstr("engine: broke"));
  EXPECT_THAT(error_of([&] { queue_->cancel_waiting(); }).what(), HasSubstr("engine: broke"));
  EXPECT_EQ(queue_->pending(), 0u);
}

TEST_P(SharedQueueTest, WhatNoQueueCanBeIsRefusedAtCreation) {
  open_files(1, kUnit);
  EXPECT_EQ(error_of([&] { open({.depth = 0}); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(error_of([&] { open({.depth = 32, .max_files = 1000}); }).code(), Code::kInvalidArgument);
}

TEST_P(SharedQueueTest, AForkedProcessIsRefusedAndItsParentIsNot) {
#ifdef SPILLWAY_THREAD_SANITIZER
  GTEST_SKIP() << "it does not follow a fork of several threads";
#endif
  open_files(1, 4 * kUnit);
  open();
  Memory memory(4 * kUnit);
  submit_writes(memory);
  const pid_t child = ::fork();
  if (child == 0) {
    int right = 0;
    IoCompletion out[1];
    const auto refused = [&](auto call) {
      try {
        call();
      } catch (const Error& error) {
        right += error.code() == Code::kUnsupported &&
                 std::string(error.what()).find("which forked this one; make one in this process") != std::string::npos;
      }
    };
    refused([&] { queue_->submit({.op = IoOp::kSync}); });
    refused([&] { queue_->wait(out, -1); });
    refused([&] { queue_->add_file(*files_[0]); });
    refused([&] { queue_->describe(); });
    queue_->wake();
    right += queue_->pending() == 0;
    queue_.reset();
    ::_exit(right == 5 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const IoCompletion& done : collect(4)) EXPECT_EQ(done.error, 0);
  expect_transfers_work(memory);
}

INSTANTIATE_TEST_SUITE_P(Engines, SharedQueueTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
