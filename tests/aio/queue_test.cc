// What a queue promises, whatever is below it: io_uring, libaio, threads, and each again with short transfers,
// interruptions, delays, reordering and refused pieces injected from a seed.
#include "spillway/io_queue.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <set>
#include <thread>

#include "queue_fixture.h"
#include "tests/seed.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;  // the alignment of a store's layout

struct Below {
  IoEngineKind kind;
  bool faulty;
};

class QueueTest : public QueueFixture, public ::testing::WithParamInterface<Below> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam().kind); !refusal.empty()) GTEST_SKIP() << refusal;
  }

  // Every fault here is one that a queue must ride out without an error. Without faults the layer only counts.
  void open(IoQueueOptions options, std::span<const std::span<std::byte>> regions = {}) {
    FaultPlan plan;
    if (GetParam().faulty) {
      plan.seed = test_seed();
      plan.script = seeded_faults(plan.seed, {.short_transfer = 0.2, .eintr = 0.1, .eagain = 0.02, .delay = 0.2},
                                  files_[0]->alignment());
      plan.takes_fewer = 0.2;
      plan.reorder = true;
    }
    open_queue(GetParam().kind, options, std::move(plan), regions);
  }

  void write_file(std::uint64_t bytes, std::uint64_t seed) {
    Memory pattern(bytes);
    pattern.fill_pattern(seed);
    files_[0]->write_at(0, pattern.span());
  }
};

TEST_P(QueueTest, BytesComeBackAsTheyWereWritten) {
  open_files(1, 8 * kMiB);
  Memory out(6 * kMiB + kUnit), in(6 * kMiB + kUnit);
  out.fill_pattern(1);
  const std::span<std::byte> regions[] = {out.span(), in.span()};
  open({.block_bytes = kMiB, .depth = 8}, regions);
  EXPECT_EQ(transfer(IoOp::kWrite, kUnit, out.span()).error, 0);
  EXPECT_EQ(transfer(IoOp::kRead, kUnit, in.span()).error, 0);
  EXPECT_TRUE(same_bytes(in.span(), out.span()));
  EXPECT_EQ(queue_->stats().write_bytes, out.span().size());
  EXPECT_EQ(queue_->stats().read_bytes, in.span().size());
  EXPECT_GT(queue_->stats().busy_seconds, 0.0);
}

TEST_P(QueueTest, EveryAlignedSizeIsMovedWholeAndNothingBesideIt) {
  open_files(1, 2 * kMiB);
  open({.block_bytes = kUnit, .depth = 4});
  const std::uint64_t unit = files_[0]->alignment();
  for (const std::uint64_t bytes : {unit, kUnit - unit, kUnit, kUnit + unit, 5 * kUnit - unit}) {
    write_file(2 * kMiB, 1);
    Memory out(5 * kUnit), whole(2 * kMiB), expected(2 * kMiB);
    out.fill_pattern(bytes);
    expected.fill_pattern(1);
    std::copy_n(out.data(), bytes, expected.data() + 3 * kUnit);
    ASSERT_EQ(transfer(IoOp::kWrite, 3 * kUnit, out.span(0, bytes)).error, 0);
    files_[0]->read_at(0, whole.span());
    ASSERT_TRUE(same_bytes(whole.span(), expected.span())) << bytes;
    Memory in(6 * kUnit);
    ASSERT_EQ(transfer(IoOp::kRead, 3 * kUnit, in.span(unit, bytes)).error, 0);
    ASSERT_TRUE(same_bytes(in.span(unit, bytes), out.span(0, bytes))) << bytes;
    ASSERT_EQ(in.data()[unit - 1], std::byte{0});
    ASSERT_EQ(in.data()[unit + bytes], std::byte{0});
  }
}

TEST_P(QueueTest, EveryRequestCompletesExactlyOnce) {
  open_files(2, 4 * kMiB);
  Memory memory(64 * kUnit);
  open({.block_bytes = kUnit / 2, .depth = 8, .max_requests = 256});
  std::multiset<std::uint64_t> returned;
  std::uint64_t submitted = 0;
  for (int round = 0; round < 4; ++round) {
    for (std::uint64_t i = 0; i < 64; ++i, ++submitted) {
      const bool sync = i % 16 == 7;
      queue_->submit({.op = sync    ? IoOp::kSync
                            : i % 3 ? IoOp::kRead
                                    : IoOp::kWrite,
                      .priority = i % 5 ? IoPriority::kNormal : IoPriority::kUrgent,
                      .file = static_cast<std::uint32_t>(i % 2),
                      .offset = i % 64 * kUnit,
                      .buffer = sync ? nullptr : memory.data() + i * kUnit,
                      .bytes = sync ? 0 : kUnit,
                      .tag = submitted});
    }
    EXPECT_EQ(queue_->pending(), 64u);
    for (const IoCompletion& completion : collect(64)) {
      EXPECT_EQ(completion.error, 0);
      returned.insert(completion.tag);
    }
    EXPECT_EQ(queue_->pending(), 0u);
  }
  for (std::uint64_t tag = 0; tag < submitted; ++tag) EXPECT_EQ(returned.count(tag), 1u) << tag;
  IoCompletion extra[1];
  EXPECT_TRUE(queue_->wait(extra, 0).empty());
}

TEST_P(QueueTest, AFileThatEndsInsideAReadIsNodata) {
  open_files(1, kUnit);
  for (const std::uint64_t size : {kUnit, kUnit + 4096, kUnit + 5000}) {
    ASSERT_EQ(::truncate(files_[0]->path().c_str(), static_cast<off_t>(size)), 0);
    open({.block_bytes = kUnit, .depth = 2});
    Memory in(4 * kUnit);
    const IoCompletion completion = transfer(IoOp::kRead, 0, in.span());
    EXPECT_EQ(completion.error, ENODATA);
    EXPECT_GE(completion.error_offset + completion.error_bytes, size);
    EXPECT_LE(completion.error_offset, 4 * kUnit);
    EXPECT_EQ(transfer(IoOp::kRead, 0, in.span(0, kUnit)).error, 0) << "the queue goes on after an error";
    queue_.reset();
  }
}

TEST_P(QueueTest, APlainFileTakesAnyOffsetLengthAndAddress) {
  files_.push_back(
      std::make_unique<File>(File::open(dir_ / "plain", {.writable = true, .create = true, .direct = false})));
  pointers_.push_back(files_.back().get());
  // Its requests would be performed inside the submission: a queue that blocks is none.
  if (GetParam().kind == IoEngineKind::kLibaio) {
    EXPECT_THROW(open({.block_bytes = 1000, .depth = 3}), Error);
    return;
  }
  open({.block_bytes = 1000, .depth = 3});
  Memory out(12345), in(12346);
  out.fill_pattern(1);
  EXPECT_EQ(transfer(IoOp::kWrite, 7, out.span()).error, 0);
  EXPECT_EQ(transfer(IoOp::kRead, 7, in.span(1, 12345)).error, 0);
  EXPECT_TRUE(same_bytes(in.span(1, 12345), out.span()));
}

TEST_P(QueueTest, ARequestThatTheKernelRefusesIsAnErrorAndItsNeighboursAreNot) {
  open_files(1, 4 * kUnit);
  write_file(4 * kUnit, 1);
  const std::filesystem::path path = files_[0]->path();
  files_[0] = std::make_unique<File>(File::open(path, {.writable = false}));
  pointers_[0] = files_[0].get();
  open({.block_bytes = kUnit, .depth = 8});
  Memory memory(4 * kUnit), expected(4 * kUnit);
  expected.fill_pattern(1);
  for (std::uint64_t tag = 0; tag < 4; ++tag) {
    queue_->submit({.op = tag % 2 ? IoOp::kWrite : IoOp::kRead,
                    .offset = tag * kUnit,
                    .buffer = memory.data() + tag * kUnit,
                    .bytes = kUnit,
                    .tag = tag});
  }
  for (const IoCompletion& completion : collect(4)) {
    EXPECT_EQ(completion.error, completion.tag % 2 ? EBADF : 0) << "the file is open for reading alone";
  }
  for (const std::uint64_t at : {0 * kUnit, 2 * kUnit}) {
    EXPECT_TRUE(same_bytes(memory.span(at, kUnit), expected.span(at, kUnit)));
  }
}

TEST_P(QueueTest, OffsetsAreOf64Bits) {
  open_files(1, kUnit);
  write_file(kUnit, 1);
  Memory out(2 * kUnit), in(2 * kUnit);
  out.fill_pattern(2);
  open({.block_bytes = kUnit, .depth = 2});
  const std::uint64_t far = (std::uint64_t{1} << 42) + 3 * kUnit;
  ASSERT_EQ(transfer(IoOp::kWrite, far, out.span()).error, 0);
  ASSERT_EQ(transfer(IoOp::kRead, far, in.span()).error, 0);
  EXPECT_TRUE(same_bytes(in.span(), out.span()));
  EXPECT_EQ(files_[0]->size_bytes(), far + 2 * kUnit);
  files_[0]->read_at(0, in.span(0, kUnit));
  out.fill_pattern(1);
  EXPECT_TRUE(same_bytes(in.span(0, kUnit), out.span(0, kUnit))) << "and nothing near the start was touched";
}

TEST_P(QueueTest, NoMorePiecesThanTheDepthAreInFlight) {
  open_files(1, 4 * kMiB);
  Memory memory(4 * kMiB);
  open({.block_bytes = kUnit, .depth = 5});
  EXPECT_EQ(transfer(IoOp::kWrite, 0, memory.span()).error, 0);
  EXPECT_LE(trace_.most_in_flight, 5u);
  if (!GetParam().faulty) {
    EXPECT_EQ(trace_.most_in_flight, 5u) << "and all of it is used";
  }
  EXPECT_GE(trace_.started.size(), 4 * kMiB / kUnit);
}

TEST_P(QueueTest, UrgentRequestsOvertakeWaitingNormalOnes) {
  open_files(1, 4 * kMiB);
  Memory memory(4 * kMiB);
  open({.block_bytes = kUnit, .depth = 2});
  for (std::uint64_t i = 0; i < 8; ++i) {
    queue_->submit({.offset = i * kUnit, .buffer = memory.data() + i * kUnit, .bytes = kUnit, .tag = i});
  }
  std::size_t returned = collect(1).size();  // the first are under way
  for (std::uint64_t i = 20; i < 23; ++i) {
    queue_->submit({.priority = IoPriority::kUrgent,
                    .offset = i * kUnit,
                    .buffer = memory.data() + i * kUnit,
                    .bytes = kUnit,
                    .tag = i});
  }
  collect(11 - returned);
  // In the order of their first start: the urgent ones follow at most what was in flight or due again, in order.
  std::vector<std::uint64_t> order;
  for (const IoPiece& piece : trace_.started) {
    const std::uint64_t request = piece.offset / kUnit;
    if (std::find(order.begin(), order.end(), request) == order.end()) order.push_back(request);
  }
  ASSERT_EQ(order.size(), 11u);
  const auto first_urgent = std::find(order.begin(), order.end(), 20u) - order.begin();
  EXPECT_LE(first_urgent, 5);
  EXPECT_EQ(order.back(), 7u) << "normal ones come last";
  if (!GetParam().faulty) {
    EXPECT_EQ(order[static_cast<std::size_t>(first_urgent) + 1], 21u);
    EXPECT_EQ(order[static_cast<std::size_t>(first_urgent) + 2], 22u);
  }
}

TEST_P(QueueTest, WakeFromAnotherThreadEndsAWait) {
  open_files(1, kUnit);
  open({.depth = 2});
  for (int round = 0; round < 20; ++round) {
    std::thread waker([&] { queue_->wake(); });
    IoCompletion out[1];
    EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
    waker.join();
  }
}

TEST_P(QueueTest, WakeBeforeTheWaitIsNotLost) {
  open_files(1, kUnit);
  open({.depth = 2});
  IoCompletion out[1];
  queue_->wake();
  EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
  queue_->wake();
  queue_->wake();
  EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
  Memory in(kUnit);
  EXPECT_EQ(transfer(IoOp::kRead, 0, in.span()).error, 0);
}

IoQueue* queue_of_the_handler = nullptr;

TEST_P(QueueTest, WakeWorksInASignalHandler) {
  open_files(1, kUnit);
  open({.depth = 2});
  queue_of_the_handler = queue_.get();
  struct sigaction action {
  }, before;
  action.sa_handler = [](int) { queue_of_the_handler->wake(); };
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  // Sent until it has worked: the thread sanitizer puts a signal off until the thread makes a call that it knows, and
  // the wait for a ring is none.
  std::atomic<bool> returned = false;
  std::thread sender([&returned, self = ::pthread_self()] {
    while (!returned) {
      ::pthread_kill(self, SIGUSR1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  IoCompletion out[1];
  EXPECT_TRUE(queue_->wait(out, kUntilWoken).empty());
  returned = true;
  sender.join();
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST_P(QueueTest, AWaitWithNothingToWaitForEndsAtItsTimeout) {
  open_files(1, kUnit);
  open({.depth = 2});
  IoCompletion out[1];
  EXPECT_TRUE(queue_->wait(out, 0).empty());
  EXPECT_TRUE(queue_->wait(out, 0.01).empty());
  EXPECT_TRUE(queue_->wait(out, -1).empty()) << "and at once where nothing is pending";
}

TEST_P(QueueTest, ANullFileIsRefused) {
  open_files(1, kUnit);
  File* const files[] = {pointers_[0], nullptr};
  try {
    IoQueue::create({.engine = IoEngineKind::kThreads}, files, {});
    ADD_FAILURE() << "it was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_STREQ(error.what(), "files: file 2 of 2 is null; open every file before the queue is made");
  }
}

TEST_P(QueueTest, AQueueClosedWithWorkInFlightNoLongerTouchesItsBuffers) {
  open_files(1, 4 * kMiB);
  write_file(4 * kMiB, 1);
  auto memory = std::make_unique<Memory>(4 * kMiB);
  open({.block_bytes = kUnit, .depth = 16});
  queue_->submit({.buffer = memory->data(), .bytes = 4 * kMiB});
  IoCompletion out[1];
  static_cast<void>(queue_->wait(out, 0));
  queue_.reset();
  memory->fill(7);
  // A late transfer would show up here, and as a use after free below.
  for (const std::byte byte : memory->span()) ASSERT_EQ(byte, std::byte{7});
}

TEST_P(QueueTest, RandomTrafficKeepsEveryByte) {
  constexpr std::uint64_t kCells = 48;
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  open_files(2, kCells * kUnit);
  Memory memory(kCells * kUnit), expected0(kCells * kUnit), expected1(kCells * kUnit);
  Memory* expected[] = {&expected0, &expected1};
  const std::span<std::byte> regions[] = {memory.span(0, 40 * kUnit)};  // some buffers lie outside
  open({.block_bytes = 3 * kUnit, .depth = 6}, regions);

  struct Flight {
    IoOp op;
    std::uint32_t file;
    std::uint64_t cell, cells;
  };
  // A cell of memory and the same cell of a file belong to one request at a time.
  std::map<std::uint64_t, Flight> flights;
  std::vector<bool> taken(kCells, false);
  const auto finish = [&](const IoCompletion& completion) {
    ASSERT_EQ(completion.error, 0);
    ASSERT_TRUE(flights.count(completion.tag));
    const Flight f = flights.extract(completion.tag).mapped();
    const auto bytes = memory.span(f.cell * kUnit, f.cells * kUnit);
    ASSERT_TRUE(same_bytes(bytes, expected[f.file]->span(f.cell * kUnit, f.cells * kUnit)));
    std::fill_n(taken.begin() + static_cast<std::ptrdiff_t>(f.cell), f.cells, false);
  };
  for (std::uint64_t tag = 0; tag < 600; ++tag) {
    Flight f{random() % 2 ? IoOp::kRead : IoOp::kWrite, static_cast<std::uint32_t>(random() % 2), random() % kCells, 1};
    while (f.cells < 8 && f.cell + f.cells < kCells && random() % 3 != 0) ++f.cells;
    bool free = true;
    for (std::uint64_t c = f.cell; c < f.cell + f.cells; ++c) free = free && !taken[c];
    if (free) {
      std::fill_n(taken.begin() + static_cast<std::ptrdiff_t>(f.cell), f.cells, true);
      const auto bytes = memory.span(f.cell * kUnit, f.cells * kUnit);
      fill_pattern(bytes, random());
      if (f.op == IoOp::kWrite) std::copy(bytes.begin(), bytes.end(), expected[f.file]->data() + f.cell * kUnit);
      flights[tag] = f;
      queue_->submit({.op = f.op,
                      .priority = random() % 2 ? IoPriority::kUrgent : IoPriority::kNormal,
                      .file = f.file,
                      .offset = f.cell * kUnit,
                      .buffer = bytes.data(),
                      .bytes = bytes.size(),
                      .tag = tag});
    }
    IoCompletion done[4];
    for (const IoCompletion& completion : queue_->wait(done, free ? 0 : 0.01)) finish(completion);
  }
  for (const IoCompletion& completion : collect(flights.size())) finish(completion);
  EXPECT_EQ(queue_->pending(), 0u);
  if (GetParam().faulty) {
    EXPECT_GT(trace_.shorts, 0u);
    EXPECT_GT(trace_.errors, 0u);
    EXPECT_GT(trace_.delays, 0u);
    EXPECT_GT(trace_.fewer, 0u);
  }
}

std::vector<Below> all_below() {
  std::vector<Below> all;
  for (const bool faulty : {false, true}) {
    for (const IoEngineKind kind : kIoEngines) all.push_back({kind, faulty});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueTest, ::testing::ValuesIn(all_below()), [](const auto& info) {
  return std::string(name_of(info.param.kind)) + (info.param.faulty ? "_with_faults" : "");
});

// Programmer errors end the process in release builds too.
class QueueDeathTest : public QueueFixture {
 protected:
  void SetUp() override {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    open_files(1, 4 * kUnit);
    std::filesystem::remove_all(dir_.path());  // who dies does not clean up
    queue_ = IoQueue::create({.engine = IoEngineKind::kThreads, .block_bytes = kUnit, .depth = 2, .max_requests = 2},
                             pointers_, {});
  }
  Memory memory_{4 * kUnit};
};

TEST_F(QueueDeathTest, UnalignedDirectRequestsAreRefused) {
  if (!files_[0]->direct()) GTEST_SKIP() << "no direct I/O on " << dir_.path();
  EXPECT_DEATH(queue_->submit({.offset = 1, .buffer = memory_.data(), .bytes = kUnit}), "multiples of File::alignment");
  EXPECT_DEATH(queue_->submit({.buffer = memory_.data() + 1, .bytes = kUnit}), "multiple of File::memory_alignment");
  EXPECT_DEATH(queue_->submit({.buffer = memory_.data(), .bytes = kUnit - 1}), "multiples of File::alignment");
}

TEST_F(QueueDeathTest, RequestsThatCannotBeAreRefused) {
  EXPECT_DEATH(queue_->submit({.file = 1, .buffer = memory_.data(), .bytes = kUnit}), "no such file");
  EXPECT_DEATH(queue_->submit({.buffer = memory_.data(), .bytes = 0}), "needs bytes");
  EXPECT_DEATH(queue_->submit({.op = IoOp::kSync, .bytes = 1}), "moves no bytes");
  EXPECT_DEATH(queue_->submit({.file = kStripedSpace, .buffer = memory_.data(), .bytes = kUnit}), "no such file");
  EXPECT_DEATH(queue_->submit({.op = IoOp::kWrite, .buffer = memory_.data(), .bytes = kUnit, .least_bytes = 1}),
               "part of a read");
}

TEST_F(QueueDeathTest, MoreRequestsThanAgreedAreRefused) {
  const IoRequest request{.buffer = memory_.data(), .bytes = kUnit};
  queue_->submit(request);
  queue_->submit(request);
  EXPECT_DEATH(queue_->submit(request), "max_requests");
}

TEST_F(QueueDeathTest, AnotherThreadIsRefused) {
  EXPECT_DEATH(std::thread([this] { queue_->submit({.buffer = memory_.data(), .bytes = kUnit}); }).join(),
               "only the thread");
}

}  // namespace
}  // namespace spillway::testing
