// Faults one by one, each with the answer that a queue must give.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "queue_fixture.h"
#include "spillway/io_queue.h"
#include "tests/seed.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;

class QueueFaultTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
    open_files(1, 16 * kUnit);
    pattern_.fill_pattern(1);
    files_[0]->write_at(0, pattern_.span());
  }
  // The given fault at the first piece, then none.
  void open_with_first(Fault fault, IoQueueOptions options = {.depth = 4}) {
    open_with([fault, used = false](const IoPiece&) mutable { return std::exchange(used, true) ? Fault{} : fault; },
              options);
  }
  void open_with(FaultScript script, IoQueueOptions options = {.depth = 4}) {
    open_queue(GetParam(), options, {.script = std::move(script)});
  }
  Memory pattern_{16 * kUnit}, in_{16 * kUnit};
};

TEST_P(QueueFaultTest, AShortReadIsResumedAtTheOffset) {
  open_with_first({.bytes = kUnit});
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
  EXPECT_TRUE(same_bytes(in_.span(), pattern_.span()));
  ASSERT_EQ(trace_.started.size(), 2u);
  EXPECT_EQ(trace_.started[1].offset, kUnit);
  EXPECT_EQ(trace_.started[1].bytes, 15 * kUnit);
  EXPECT_EQ(trace_.started[1].buffer, in_.data() + kUnit);
}

TEST_P(QueueFaultTest, AShortWriteIsResumedAtTheOffset) {
  open_with_first({.bytes = 3 * kUnit});
  Memory out(16 * kUnit);
  out.fill_pattern(2);
  EXPECT_EQ(transfer(IoOp::kWrite, 0, out.span()).error, 0);
  EXPECT_EQ(trace_.started.size(), 2u);
  files_[0]->read_at(0, in_.span());
  EXPECT_TRUE(same_bytes(in_.span(), out.span()));
}

TEST_P(QueueFaultTest, ATransferThatStopsInsideASectorIsRepeatedFromItsStart) {
  const std::uint32_t sector = files_[0]->alignment();
  if (sector == 1) GTEST_SKIP() << "no direct I/O on " << dir_.path();
  open_with_first({.moved = 5 * sector + 7});
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
  ASSERT_EQ(trace_.started.size(), 2u);
  EXPECT_EQ(trace_.started[1].offset, 5 * sector);
  EXPECT_TRUE(same_bytes(in_.span(), pattern_.span()));
}

TEST_P(QueueFaultTest, InterruptionsAreRetried) {
  for (const int error : {EINTR, EAGAIN}) {
    trace_.started.clear();
    open_with_first({.error = error});
    EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
    EXPECT_EQ(trace_.started.size(), 2u);
    EXPECT_TRUE(same_bytes(in_.span(), pattern_.span()));
    queue_.reset();
  }
}

TEST_P(QueueFaultTest, RetriesAreBounded) {
  for (const int error : {EINTR, EAGAIN}) {
    trace_.started.clear();
    open_with([error](const IoPiece&) { return Fault{.error = error}; });
    EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, error);
    EXPECT_GT(trace_.started.size(), 3u);
    EXPECT_LT(trace_.started.size(), 50u);
    queue_.reset();
  }
}

TEST_P(QueueFaultTest, ProgressRenewsTheRetries) {
  // Every second attempt fails, far more often in all than one place may.
  open_with([n = 0](const IoPiece&) mutable { return n++ % 2 ? Fault{.bytes = 4096} : Fault{.error = EINTR}; });
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span(0, 4 * kUnit)).error, 0);
  EXPECT_GE(trace_.started.size(), 2 * 4 * kUnit / 4096 - 2);
  EXPECT_TRUE(same_bytes(in_.span(0, 4 * kUnit), pattern_.span(0, 4 * kUnit)));
}

TEST_P(QueueFaultTest, AWriteThatNeverMovesAByteBecomesAnError) {
  open_with([](const IoPiece& piece) { return piece.op == IoOp::kWrite ? Fault{.moved = 0} : Fault{}; });
  EXPECT_EQ(transfer(IoOp::kWrite, 0, pattern_.span()).error, EIO);
}

TEST_P(QueueFaultTest, AnErrorNamesThePieceAndLeavesTheOthersAlone) {
  open_with(
      [](const IoPiece& p) { return p.offset == 5 * kUnit && p.op == IoOp::kRead ? Fault{.error = EIO} : Fault{}; },
      {.block_bytes = kUnit, .depth = 3});
  for (std::uint64_t i = 0; i < 4; ++i) {
    queue_->submit({.offset = 4 * i * kUnit, .buffer = in_.data() + 4 * i * kUnit, .bytes = 4 * kUnit, .tag = i});
  }
  for (const IoCompletion& completion : collect(4)) {
    if (completion.tag != 1) {
      EXPECT_EQ(completion.error, 0);
      continue;
    }
    EXPECT_EQ(completion.error, EIO);
    EXPECT_EQ(completion.error_offset, 5 * kUnit);
    EXPECT_EQ(completion.error_bytes, kUnit);
    EXPECT_EQ(transfer_error(IoOp::kRead, *files_[0], completion, "check the drive").what(),
              files_[0]->path().string() +
                  ": read of 65536 bytes at offset 327680 failed (Input/output error); check the drive");
  }
  for (const std::uint64_t i : {0u, 2u, 3u}) {
    EXPECT_TRUE(same_bytes(in_.span(4 * i * kUnit, 4 * kUnit), pattern_.span(4 * i * kUnit, 4 * kUnit)));
  }
  EXPECT_EQ(queue_->pending(), 0u);
}

TEST_P(QueueFaultTest, ARequestWhosePiecesAllFailCompletesOnce) {
  open_with([](const IoPiece&) { return Fault{.error = EIO}; }, {.block_bytes = kUnit, .depth = 4});
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, EIO);
  IoCompletion out[2];
  EXPECT_TRUE(queue_->wait(out, 0.01).empty());
  EXPECT_EQ(queue_->pending(), 0u);
  EXPECT_LE(trace_.started.size(), 8u) << "what follows a failure is not started";
}

TEST_P(QueueFaultTest, AFullDiskIsReportedAsSuch) {
  open_with([](const IoPiece& piece) { return Fault{.error = piece.op == IoOp::kWrite ? ENOSPC : 0}; });
  EXPECT_EQ(transfer(IoOp::kWrite, 0, pattern_.span()).error, ENOSPC);
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
}

TEST_P(QueueFaultTest, AFailedSyncIsFinal) {
  for (const int error : {EIO, EINTR}) {
    open_files(1, kUnit);
    const auto file = static_cast<std::uint32_t>(files_.size() - 1);
    trace_.started.clear();
    open_with([error, syncs = 0](const IoPiece& piece) mutable {
      return Fault{.error = piece.op == IoOp::kSync && syncs++ == 0 ? error : 0};
    });
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}, file).error, error);
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}, file).error, error);
    EXPECT_EQ(trace_.started.size(), 1u) << "neither retried nor asked again";
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}, 0).error, 0) << "other files are well";
    EXPECT_EQ(queue_->stats().syncs, 1u);
    EXPECT_THROW(files_[file]->sync(), Error);
    queue_.reset();
  }
}

// As io_uring does where a limit on processes leaves it no worker.
TEST_P(QueueFaultTest, ASyncThatWasNeverBegunIsMadeByTheQueue) {
  CapturedLog log;
  open_with([](const IoPiece&) { return Fault{.error = ECANCELED}; });
  for (int i = 0; i < 2; ++i) EXPECT_EQ(transfer(IoOp::kSync, 0, {}).error, 0);
  EXPECT_EQ(queue_->stats().syncs, 2u);
  EXPECT_EQ(log.count(files_[0]->path().string() + ": the kernel can start no thread for a sync"), 1u) << log.all();
  files_[0]->note_sync_failure(EIO);
  EXPECT_EQ(transfer(IoOp::kSync, 0, {}).error, EIO) << "an earlier one that failed stays final";
}

TEST_P(QueueFaultTest, ATransferThatWasNeverBegunIsBegunAgain) {
  open_with_first({.error = ECANCELED});
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
  EXPECT_TRUE(same_bytes(in_.span(), pattern_.span()));
  EXPECT_EQ(trace_.started.size(), 2u);
}

TEST_P(QueueFaultTest, ASyncThatRanBesideAFailedOneIsNotBelieved) {
  open_with([n = 0](const IoPiece&) mutable { return n++ == 0 ? Fault{.error = EIO} : Fault{.hold = 3}; });
  queue_->submit({.op = IoOp::kSync, .tag = 0});
  queue_->submit({.op = IoOp::kSync, .tag = 1});
  for (const IoCompletion& completion : collect(2)) EXPECT_EQ(completion.error, EIO);
  EXPECT_EQ(trace_.started.size(), 2u);
}

TEST_P(QueueFaultTest, AStalledPieceIsReportedWhileItWaits) {
  CapturedLog log;
  open_with({}, {.depth = 4, .stall_report_seconds = 0.02});
  trace_.hold_all = true;
  queue_->submit({.offset = kUnit, .buffer = in_.data(), .bytes = kUnit});
  IoCompletion out[1];
  while (log.count("has made no progress") < 2) EXPECT_TRUE(queue_->wait(out, 0.01).empty());
  EXPECT_GE(log.count(files_[0]->path().string() + ": read of 65536 bytes at offset 65536"), 2u) << log.all();
  trace_.hold_all = false;
  EXPECT_EQ(collect(1).front().error, 0);
}

TEST_P(QueueFaultTest, AStallIsReportedInAWaitThatHasNoEnd) {
  CapturedLog log;
  open_with({}, {.depth = 4, .stall_report_seconds = 0.02});
  trace_.hold_all = true;
  std::thread watcher([&] {
    while (log.count("has made no progress") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    trace_.hold_all = false;
  });
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
  watcher.join();
}

TEST_P(QueueFaultTest, AnEngineThatTakesFewerThanOfferedLosesNothing) {
  open_queue(GetParam(), {.block_bytes = kUnit / 4, .depth = 16}, {.seed = test_seed(), .takes_fewer = 0.9});
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span()).error, 0);
  EXPECT_TRUE(same_bytes(in_.span(), pattern_.span()));
  EXPECT_GT(trace_.fewer, 0u);
}

TEST_P(QueueFaultTest, ATornWriteThatIsReportedIsAnErrorAndLeavesWholeSectors) {
  constexpr std::uint64_t kStored = 0b1011;
  open_with_first({.error = EIO, .stored_sectors = kStored});
  Memory out(4 * kUnit), whole(4 * kUnit);
  out.fill_pattern(2);
  const IoCompletion completion = transfer(IoOp::kWrite, 0, out.span());
  EXPECT_EQ(completion.error, EIO);
  EXPECT_EQ(completion.error_bytes, 4 * kUnit);
  files_[0]->read_at(0, whole.span());
  const std::uint64_t sector = std::max<std::uint64_t>(512, files_[0]->alignment());
  for (std::uint64_t at = 0; at < 4 * kUnit; at += sector) {
    Memory& expected = kStored >> at / sector % 64 & 1 ? out : pattern_;
    ASSERT_TRUE(same_bytes(whole.span(at, sector), expected.span(at, sector))) << at;
  }
}

// What nobody reports a queue cannot see: that is why extents carry checksums. It must not make anything worse.
TEST_P(QueueFaultTest, ADriveThatLiesOrFlipsABitHarmsThoseBytesAlone) {
  const std::uint64_t sector = std::max<std::uint64_t>(512, files_[0]->alignment());
  open_with([n = 0](const IoPiece&) mutable {
    switch (n++) {
      case 0: return Fault{.stored_sectors = ~std::uint64_t{2}};  // all but the second of every 64
      case 1: return Fault{.flipped_bit = 8 * kUnit + 3};
      case 2: return Fault{.flipped_bit = 7};
      default: return Fault{};
    }
  });
  Memory out(16 * kUnit), caller(16 * kUnit), whole(16 * kUnit);
  out.fill_pattern(2);
  caller.fill_pattern(2);
  // A write that loses a sector, one that stores a wrong bit, a read that delivers another.
  const std::uint64_t first = std::min(kUnit, 64 * sector);
  EXPECT_EQ(transfer(IoOp::kWrite, 0, out.span(0, first)).error, 0);
  EXPECT_EQ(transfer(IoOp::kWrite, kUnit, out.span(kUnit, 3 * kUnit)).error, 0);
  EXPECT_EQ(transfer(IoOp::kRead, 0, in_.span(0, 4 * kUnit)).error, 0);
  EXPECT_TRUE(same_bytes(out.span(), caller.span())) << "a write leaves the caller's buffer alone";
  std::copy_n(pattern_.data() + sector, sector, caller.data() + sector);
  std::copy_n(pattern_.data() + first, kUnit - first, caller.data() + first);
  caller.data()[2 * kUnit] ^= std::byte{8};
  files_[0]->read_at(0, whole.span());
  EXPECT_TRUE(same_bytes(whole.span(0, 4 * kUnit), caller.span(0, 4 * kUnit)));
  EXPECT_TRUE(same_bytes(whole.span(4 * kUnit, 12 * kUnit), pattern_.span(4 * kUnit, 12 * kUnit)));
  caller.data()[0] ^= std::byte{128};
  EXPECT_TRUE(same_bytes(in_.span(0, 4 * kUnit), caller.span(0, 4 * kUnit)));
  EXPECT_EQ(trace_.flips, 2u);
  EXPECT_EQ(trace_.lies, 1u);
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueFaultTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
