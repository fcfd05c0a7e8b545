// What starts when: priorities, the bound on what is in flight, and that nothing waits for what it need not wait for.
// What is in flight is held back below the queue, so that the order of events does not depend on time.
#include <algorithm>
#include <cmath>
#include <set>

#include "queue_fixture.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;

class QueueOrderTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
    open_files(2, 64 * kUnit);
  }

  void submit(std::uint64_t tag, IoPriority priority = IoPriority::kNormal, IoOp op = IoOp::kRead,
              std::uint32_t file = 0, std::uint64_t units = 1) {
    const bool sync = op == IoOp::kSync;
    queue_->submit({.op = op,
                    .priority = priority,
                    .file = file,
                    .offset = sync ? 0 : tag * kUnit,
                    .buffer = sync ? nullptr : memory_.data() + tag * kUnit,
                    .bytes = sync ? 0 : units * kUnit,
                    .tag = tag});
  }

  // Starts what may start while everything is held back.
  void start_held() {
    trace_.hold_all = true;
    IoCompletion out[1];
    ASSERT_TRUE(queue_->wait(out, 0).empty());
  }

  // Which unit of its file each piece began with, in the order of their start.
  std::vector<std::uint64_t> started(std::uint32_t file = 0) const {
    std::vector<std::uint64_t> units;
    for (const IoPiece& piece : trace_.started) {
      if (piece.file == file) units.push_back(piece.offset / kUnit);
    }
    return units;
  }

  static std::set<std::uint64_t> tags_of(const std::vector<IoCompletion>& completions) {
    std::set<std::uint64_t> tags;
    for (const IoCompletion& completion : completions) {
      EXPECT_EQ(completion.error, 0);
      tags.insert(completion.tag);
    }
    return tags;
  }

  using Units = std::vector<std::uint64_t>;
  Memory memory_{128 * kUnit};
};

TEST_P(QueueOrderTest, ReadsThatComputeWaitsForOvertakeWaitingWritesAndReads) {
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2}, {});
  for (std::uint64_t tag = 0; tag < 4; ++tag) submit(tag, IoPriority::kNormal, IoOp::kWrite);
  for (std::uint64_t tag = 4; tag < 6; ++tag) submit(tag);
  start_held();
  for (std::uint64_t tag = 20; tag < 23; ++tag) submit(tag, IoPriority::kUrgent);
  trace_.hold_all = false;
  EXPECT_EQ(tags_of(collect(9)).size(), 9u);
  const Units order = started();  // pieces that complete together let the next ones start together
  ASSERT_EQ(order.size(), 9u);
  EXPECT_EQ(Units(order.begin(), order.begin() + 2), Units({4, 0})) << "a read and a write";
  EXPECT_EQ(Units(order.begin() + 2, order.begin() + 5), Units({20, 21, 22}));
}

// Drives move both ways at once: of normal requests, neither reads nor writes keep the others waiting.
TEST_P(QueueOrderTest, ReadsAndWritesShareTheSlotsEachInOrder) {
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 4}, {});
  for (std::uint64_t tag = 0; tag < 4; ++tag) submit(tag, IoPriority::kNormal, IoOp::kWrite);
  for (std::uint64_t tag = 4; tag < 8; ++tag) submit(tag);
  start_held();
  EXPECT_EQ(started(), Units({4, 0, 5, 1}));
  trace_.hold_all = false;
  EXPECT_EQ(tags_of(collect(8)).size(), 8u);
  Units reads, writes;
  for (const std::uint64_t unit : started()) (unit < 4 ? writes : reads).push_back(unit);
  EXPECT_EQ(writes, Units({0, 1, 2, 3}));
  EXPECT_EQ(reads, Units({4, 5, 6, 7}));
}

TEST_P(QueueOrderTest, AnUrgentReadOvertakesTheRestOfALargeRequest) {
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2}, {});
  submit(0, IoPriority::kNormal, IoOp::kWrite, 0, 6);
  start_held();
  submit(20, IoPriority::kUrgent);
  trace_.hold_all = false;
  EXPECT_EQ(tags_of(collect(2)).size(), 2u);
  EXPECT_EQ(started(), Units({0, 1, 20, 2, 3, 4, 5}));
}

TEST_P(QueueOrderTest, AnUrgentReadOfAStripedSpaceOvertakesOnEveryFile) {
  const std::uint32_t shares[] = {2, 1};
  const StripeMap stripes(shares, kUnit, 0);
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 1, .stripes = &stripes}, {});
  submit(0, IoPriority::kNormal, IoOp::kWrite, kStripedSpace, 9);  // units 0 to 5 of file 0, 0 to 2 of file 1
  start_held();
  submit(60, IoPriority::kUrgent, IoOp::kRead, kStripedSpace, 3);  // 40 and 41, 20
  trace_.hold_all = false;
  EXPECT_EQ(tags_of(collect(2)).size(), 2u);
  EXPECT_EQ(started(0), Units({0, 40, 41, 1, 2, 3, 4, 5}));
  EXPECT_EQ(started(1), Units({0, 20, 1, 2}));
}

TEST_P(QueueOrderTest, NothingDrains) {
  // One piece of the first request and a sync stay in flight; everything after them comes and goes.
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 3}, {});
  trace_.hold_if = [](const IoPiece& piece) { return piece.op == IoOp::kSync || piece.offset == kUnit; };
  submit(0, IoPriority::kNormal, IoOp::kRead, 0, 4);
  submit(5, IoPriority::kNormal, IoOp::kSync);
  for (std::uint64_t tag = 10; tag < 50; ++tag) submit(tag, IoPriority::kNormal, tag % 2 ? IoOp::kRead : IoOp::kWrite);
  const std::set<std::uint64_t> done = tags_of(collect(40));
  EXPECT_EQ(done.size(), 40u);
  EXPECT_EQ(*done.begin(), 10u) << "each completes on its own";
  EXPECT_EQ(queue_->pending(), 2u);
  trace_.hold_if = {};
  EXPECT_EQ(tags_of(collect(2)), std::set<std::uint64_t>({0, 5}));
}

TEST_P(QueueOrderTest, ASlowFileDoesNotHoldUpRequestsOnAnother) {
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2}, {});
  trace_.hold_if = [](const IoPiece& piece) { return piece.file == 0; };
  for (std::uint64_t tag = 0; tag < 30; ++tag) submit(tag, IoPriority::kUrgent);
  for (std::uint64_t tag = 30; tag < 50; ++tag) submit(tag, IoPriority::kNormal, IoOp::kRead, 1);
  const std::set<std::uint64_t> done = tags_of(collect(20));
  EXPECT_EQ(*done.begin(), 30u) << "not even urgent requests of the slow file are waited for";
  EXPECT_EQ(queue_->pending(), 30u);
  EXPECT_EQ(started(0).size(), 2u);
  trace_.hold_if = {};
  EXPECT_EQ(tags_of(collect(30)).size(), 30u);
}

TEST_P(QueueOrderTest, ASlowMemberOfAStripedSpaceHoldsUpItsOwnPartAlone) {
  const std::uint32_t shares[] = {1, 1};
  const StripeMap stripes(shares, kUnit, 0);
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2, .stripes = &stripes}, {});
  trace_.hold_if = [](const IoPiece& piece) { return piece.file == 0; };
  for (std::uint64_t i = 0; i < 5; ++i) submit(8 * i, IoPriority::kNormal, IoOp::kRead, kStripedSpace, 8);
  submit(41, IoPriority::kNormal, IoOp::kRead, kStripedSpace);  // all of it on file 1
  EXPECT_EQ(tags_of(collect(1)), std::set<std::uint64_t>({41}));
  EXPECT_EQ(started(0).size(), 2u);
  EXPECT_EQ(started(1).size(), 21u) << "five times four units, and one";
  trace_.hold_if = {};
  EXPECT_EQ(tags_of(collect(5)).size(), 5u);
}

TEST_P(QueueOrderTest, BytesInFlightAreBoundedPerFileByDepthTimesBlock) {
  const std::uint32_t shares[] = {1, 1};
  const StripeMap stripes(shares, 2 * kUnit, 0);
  open_queue(GetParam(), {.block_bytes = 2 * kUnit, .depth = 3, .stripes = &stripes}, {});
  for (std::uint64_t tag = 0; tag < 48; tag += 16) submit(tag, IoPriority::kNormal, IoOp::kRead, kStripedSpace, 16);
  for (std::uint64_t tag = 48; tag < 64; tag += 4) submit(tag, IoPriority::kUrgent, IoOp::kRead, 0, 4);
  EXPECT_EQ(tags_of(collect(7)).size(), 7u);
  for (const std::uint32_t file : {0u, 1u}) {
    EXPECT_EQ(trace_.loads[file].most_pieces, 3u) << "the bound, and all that it allows";
    EXPECT_EQ(trace_.loads[file].most_bytes, 3 * 2 * kUnit);
    EXPECT_EQ(trace_.loads[file].bytes, 0u);
  }
}

TEST_P(QueueOrderTest, ARefusedPieceIsOfferedAgainWhileAnotherFileIsStillAtWork) {
  // The refusal of file 1 falls due while file 0 has something in flight that will not complete.
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2}, {.script = [n = 0](const IoPiece& piece) mutable {
               return Fault{.error = piece.file == 1 && n++ < 3 ? EAGAIN : 0};
             }});
  trace_.hold_if = [](const IoPiece& piece) { return piece.file == 0; };
  submit(0);
  submit(1, IoPriority::kNormal, IoOp::kRead, 1);
  EXPECT_EQ(tags_of(collect(1)), std::set<std::uint64_t>({1}));
  trace_.hold_if = {};
  EXPECT_EQ(tags_of(collect(1)), std::set<std::uint64_t>({0}));
}

// Has no room for the second file's pieces at first, and never finishes the first file's before the second's.
class CrampedEngine final : public IoEngine {
 public:
  explicit CrampedEngine(double& longest_wait) : longest_wait_(longest_wait) {}

  std::size_t submit(std::span<const IoPiece> pieces) override {
    std::size_t taken = 0;
    for (; taken < pieces.size(); ++taken) {
      if (pieces[taken].file == 1 && refusals_-- > 0) break;
      (pieces[taken].file == 0 ? slow_ : quick_).push_back(pieces[taken]);
    }
    return taken;
  }
  Reaped reap(std::span<IoResult> out, double timeout_seconds) override {
    auto& done = quick_.empty() && refusals_ < 0 ? slow_ : quick_;
    if (done.empty()) {
      longest_wait_ = std::max(longest_wait_, timeout_seconds < 0 ? INFINITY : timeout_seconds);
      return {};
    }
    out[0] = {done.back().slot, static_cast<std::int64_t>(done.back().bytes)};
    done.pop_back();
    return {.count = 1};
  }
  void wake() noexcept override {}
  std::string describe() const override { return "cramped"; }
  void set_file(std::uint32_t, const File*) override {}
  bool add_region(std::span<std::byte>) override { return false; }
  void remove_region(std::span<std::byte>) override {}

 private:
  double& longest_wait_;
  int refusals_ = 3;
  std::vector<IoPiece> slow_, quick_;
};

TEST_F(QueueFixture, APieceThatWasNotTakenDoesNotWaitForACompletionOfAnotherFile) {
  open_files(2, kUnit);
  Memory memory(2 * kUnit);
  double longest_wait = 0;
  queue_ = make_queue({.block_bytes = kUnit, .depth = 1}, pointers_, std::make_unique<CrampedEngine>(longest_wait));
  for (const std::uint32_t file : {0u, 1u}) {
    queue_->submit({.file = file, .buffer = memory.data() + file * kUnit, .bytes = kUnit, .tag = file});
  }
  EXPECT_EQ(collect(1).front().tag, 1u);
  EXPECT_EQ(collect(1).front().tag, 0u);
  EXPECT_GT(longest_wait, 0.0);
  EXPECT_LT(longest_wait, 0.1) << "the engine was to wait for longer than a moment";
}

TEST_P(QueueOrderTest, AStripedRequestThatFailsOnOneFileCompletesOnceAndNamesThatFile) {
  const std::uint32_t shares[] = {1, 1};
  const StripeMap stripes(shares, kUnit, kUnit);
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2, .stripes = &stripes},
             {.script = [](const IoPiece& piece) { return Fault{.error = piece.file == 1 ? EIO : 0}; }});
  submit(1, IoPriority::kNormal, IoOp::kRead, kStripedSpace, 20);
  const IoCompletion completion = collect(1).front();
  EXPECT_EQ(completion.tag, 1u);
  EXPECT_EQ(completion.error, EIO);
  EXPECT_EQ(completion.error_file, 1u);
  EXPECT_EQ(completion.error_offset, kUnit) << "in that file";
  EXPECT_EQ(completion.error_bytes, kUnit);
  EXPECT_EQ(queue_->pending(), 0u);
  IoCompletion extra[1];
  EXPECT_TRUE(queue_->wait(extra, 0).empty());
}

TEST_P(QueueOrderTest, ASyncOfAStripedSpaceSyncsEveryFileAndCompletesOnce) {
  const std::uint32_t shares[] = {3, 1};
  const StripeMap stripes(shares, kUnit, 0);
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 2, .stripes = &stripes}, {});
  submit(7, IoPriority::kNormal, IoOp::kSync, kStripedSpace);
  EXPECT_EQ(tags_of(collect(1)), std::set<std::uint64_t>({7}));
  EXPECT_EQ(queue_->stats().syncs, 2u);
  EXPECT_EQ(started(0).size() + started(1).size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueOrderTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
