// Files and regions that come to a queue after its creation, and go; and requests that are cancelled.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <set>
#include <string>
#include <vector>

#include "queue_fixture.h"
#include "spillway/io_queue.h"
#include "tests/error_of.h"

namespace spillway::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kUnit = 64 * kKiB;

class QueueLaterTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
  }
  void open(IoQueueOptions options, std::span<const std::span<std::byte>> regions = {}) {
    open_queue(GetParam(), options, {}, regions);
  }
  // A file that the queue does not have yet.
  File& new_file(std::uint64_t bytes) {
    later_.push_back(std::make_unique<File>(File::open(dir_ / ("later" + std::to_string(later_.size())), kNewFile)));
    later_.back()->preallocate(bytes);
    return *later_.back();
  }
  void expect_moves(std::uint32_t index, std::uint64_t seed) {
    Memory out(8 * kUnit), in(8 * kUnit);
    out.fill_pattern(seed);
    EXPECT_EQ(transfer(IoOp::kWrite, 0, out.span(), index).error, 0);
    EXPECT_EQ(transfer(IoOp::kRead, 0, in.span(), index).error, 0);
    EXPECT_TRUE(same_bytes(out.span(), in.span()));
  }
  bool registers() const { return queue_->describe().find(" registered buffers") != std::string::npos; }

  std::vector<std::unique_ptr<File>> later_;
};

TEST_P(QueueLaterTest, AFileAddedWhileRequestsFlyTakesItsOwn) {
  open_files(1, 64 * kUnit);
  Memory memory(64 * kUnit), later(8 * kUnit), back(8 * kUnit);
  memory.fill_pattern(1);
  later.fill_pattern(2);
  open({.block_bytes = kUnit, .depth = 8, .max_files = 2});
  trace_.hold_all = true;
  for (std::uint64_t i = 0; i < 16; ++i) {
    queue_->submit({.op = IoOp::kWrite,
                    .offset = i * 4 * kUnit,
                    .buffer = memory.data() + i * 4 * kUnit,
                    .bytes = 4 * kUnit,
                    .tag = i});
  }
  IoCompletion none[1];
  EXPECT_TRUE(queue_->wait(none, 0).empty());
  EXPECT_GT(trace_.in_flight, 0u);
  File& file = new_file(8 * kUnit);
  EXPECT_EQ(queue_->add_file(file), 1u);
  queue_->submit({.op = IoOp::kWrite, .file = 1, .buffer = later.data(), .bytes = 8 * kUnit, .tag = 16});
  trace_.hold_all = false;
  std::set<std::uint64_t> tags;
  for (const IoCompletion& done : collect(17)) {
    EXPECT_EQ(done.error, 0);
    tags.insert(done.tag);
  }
  EXPECT_EQ(tags.size(), 17u);
  file.read_at(0, back.span());
  EXPECT_TRUE(same_bytes(later.span(), back.span()));
}

TEST_P(QueueLaterTest, AQueueMayBeginWithoutFiles) {
  open({.block_bytes = kUnit, .depth = 8, .max_files = 3});
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(queue_->add_file(new_file(8 * kUnit)), i);
    expect_moves(i, i);
  }
  const Error full = error_of([&] { queue_->add_file(new_file(kUnit)); });
  EXPECT_EQ(full.code(), Code::kInvalidArgument);
  EXPECT_THAT(full.what(), HasSubstr("later3: the I/O queue has no place for it beside its 3 files; raise max_files"));
}

TEST_P(QueueLaterTest, AFileThatGoesLeavesItsPlaceToTheNext) {
  open_files(2, 8 * kUnit);
  open({.block_bytes = kUnit, .depth = 4});
  queue_->remove_file(0);
  EXPECT_EQ(error_of([&] { queue_->remove_file(0); }).code(), Code::kInvalidArgument);
  files_[0].reset();  // it may end, and the other one works
  expect_moves(1, 3);
  EXPECT_EQ(queue_->add_file(new_file(8 * kUnit)), 0u);
  expect_moves(0, 4);
}

TEST_P(QueueLaterTest, AFileWithWorkUnderWayOrAShareOfTheSpaceStays) {
  open_files(1, 8 * kUnit);
  const std::uint32_t shares[] = {1};
  const StripeMap stripes(shares, kUnit, 0);
  open({.block_bytes = kUnit, .depth = 4, .stripes = &stripes, .max_files = 2});
  EXPECT_THAT(error_of([&] { queue_->remove_file(0); }).what(), HasSubstr("is a part of the striped space"));
  queue_->add_file(new_file(8 * kUnit));
  Memory memory(8 * kUnit);
  queue_->submit({.op = IoOp::kWrite, .file = 1, .buffer = memory.data(), .bytes = 8 * kUnit});
  const Error busy = error_of([&] { queue_->remove_file(1); });
  EXPECT_EQ(busy.code(), Code::kBusy);
  EXPECT_THAT(busy.what(), HasSubstr("later0: requests of the I/O queue are under way on it"));
  collect(1);
  queue_->remove_file(1);
  // The striped space is the first file's alone, whatever came later.
  queue_->submit({.op = IoOp::kWrite, .file = kStripedSpace, .buffer = memory.data(), .bytes = 8 * kUnit});
  EXPECT_EQ(collect(1).front().error, 0);
}

TEST_P(QueueLaterTest, ARegionThatComesLaterIsRegisteredWhereTheKernelRegistersAny) {
  open_files(1, 64 * kUnit);
  Memory first(16 * kUnit), second(16 * kUnit);
  const std::span<std::byte> regions[] = {first.span()};
  CapturedLog log;
  open({.block_bytes = kUnit, .depth = 8, .max_regions = 3}, regions);
  const bool registered = queue_->add_region(second.span());
  EXPECT_EQ(registered, registers()) << queue_->describe();
  EXPECT_EQ(registered, GetParam() == IoEngineKind::kIoUring && log.count("registered buffers") == 0) << log.all();
  for (Memory* memory : {&second, &first}) {
    memory->fill_pattern(7);
    Memory expected(16 * kUnit);
    expected.fill_pattern(7);
    EXPECT_EQ(transfer(IoOp::kWrite, 0, memory->span()).error, 0);
    memory->fill(0);
    EXPECT_EQ(transfer(IoOp::kRead, 0, memory->span()).error, 0);
    EXPECT_TRUE(same_bytes(memory->span(), expected.span()));
  }
  // One after the other in the same places.
  for (int i = 0; i < 40; ++i) {
    queue_->remove_region(second.data());
    ASSERT_EQ(queue_->add_region(second.span()), registered) << i << log.all();
  }
  expect_transfers_work(second);
}

TEST_P(QueueLaterTest, ARegionMayGoWhileItsTransfersFly) {
  open_files(1, 64 * kUnit);
  Memory memory(64 * kUnit), back(64 * kUnit);
  open({.block_bytes = kUnit, .depth = 4, .max_regions = 1});
  queue_->add_region(memory.span());
  memory.fill_pattern(11);
  trace_.hold_all = true;
  queue_->submit({.op = IoOp::kWrite, .buffer = memory.data(), .bytes = 64 * kUnit});
  IoCompletion none[1];
  EXPECT_TRUE(queue_->wait(none, 0).empty());
  queue_->remove_region(memory.data());
  trace_.hold_all = false;
  EXPECT_EQ(collect(1).front().error, 0);
  files_[0]->read_at(0, back.span());
  EXPECT_TRUE(same_bytes(memory.span(), back.span()));
}

TEST_P(QueueLaterTest, RegionsThatCannotBeAreRefusedByName) {
  open_files(1, 8 * kUnit);
  Memory memory(4 * kUnit), other(kUnit);
  open({.depth = 4, .max_regions = 2});
  queue_->add_region(memory.span(0, 2 * kUnit));
  const auto refused = [&](std::span<std::byte> region, const char* why) {
    const Error error = error_of([&] { queue_->add_region(region); });
    EXPECT_EQ(error.code(), Code::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(why));
  };
  refused({}, "is empty");
  refused(memory.span(0, 2 * kUnit), "overlaps a region");
  refused(memory.span(kUnit, 3 * kUnit), "overlaps a region");
  queue_->add_region(memory.span(2 * kUnit, 2 * kUnit));
  refused(other.span(), "has no place for it beside its 2 regions; raise max_regions");
  EXPECT_THAT(error_of([&] { queue_->remove_region(other.data()); }).what(), HasSubstr("is none of the I/O queue's"));
}

TEST_P(QueueLaterTest, CancelledRequestsEndAndSayWhatWasNotBegun) {
  open_files(2, 32 * kUnit);
  Memory memory(32 * kUnit), into(8 * kUnit);
  const std::uint32_t shares[] = {1, 1};
  const StripeMap stripes(shares, kUnit, 0);
  open({.block_bytes = kUnit, .depth = 2, .stripes = &stripes});
  trace_.hold_all = true;
  queue_->submit({.op = IoOp::kWrite, .buffer = memory.data(), .bytes = kUnit, .tag = 1});  // all of it in flight
  queue_->submit({.op = IoOp::kWrite, .file = 1, .buffer = memory.data(), .bytes = 8 * kUnit, .tag = 2});  // a part
  queue_->submit({.op = IoOp::kWrite, .offset = 4 * kUnit, .buffer = memory.data(), .bytes = kUnit, .tag = 3});
  queue_->submit({.op = IoOp::kRead, .file = kStripedSpace, .buffer = into.data(), .bytes = 8 * kUnit, .tag = 4});
  queue_->submit({.op = IoOp::kSync, .tag = 5});
  IoCompletion none[1];
  EXPECT_TRUE(queue_->wait(none, 0).empty());
  queue_->cancel_waiting();
  trace_.hold_all = false;
  std::vector<IoCompletion> done = collect(5);
  std::ranges::sort(done, {}, &IoCompletion::tag);
  EXPECT_EQ(done[0].error, 0);
  for (std::size_t i = 1; i < 5; ++i) EXPECT_EQ(done[i].error, ECANCELED) << i;
  EXPECT_EQ(std::pair(done[1].error_file, done[1].error_offset), std::pair(1u, kUnit));
  EXPECT_EQ(std::pair(done[2].error_offset, done[2].error_bytes), std::pair(4 * kUnit, kUnit));
  EXPECT_EQ(queue_->pending(), 0u);
  expect_transfers_work(memory);
}

// What is registered are the pages that the region had then. Once it has others, a transfer still moves the old ones.
TEST_P(QueueLaterTest, TransfersOfALaterRegionUseItsRegisteredPages) {
  if (GetParam() != IoEngineKind::kIoUring) GTEST_SKIP() << "no other engine registers any";
  open_files(1, 4 * kUnit);
  Memory pattern(4 * kUnit), zeros(4 * kUnit);
  pattern.fill_pattern(9);
  files_[0]->write_at(0, pattern.span());
  void* const mapped = ::mmap(nullptr, 4 * kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const std::span<std::byte> region(static_cast<std::byte*>(mapped), 4 * kUnit);
  std::ranges::fill(region, std::byte{1});
  open({.block_bytes = kUnit, .depth = 4, .max_regions = 1});
  if (!queue_->add_region(region)) {
    ::munmap(mapped, region.size());
    GTEST_SKIP() << "the kernel registers none: " << queue_->describe();
  }
  ASSERT_EQ(::madvise(mapped, region.size(), MADV_DONTNEED), 0);
  EXPECT_EQ(transfer(IoOp::kRead, 0, region).error, 0);
  EXPECT_TRUE(same_bytes(region, zeros.span()));
  queue_->remove_region(region.data());
  EXPECT_EQ(transfer(IoOp::kRead, 0, region).error, 0);
  EXPECT_TRUE(same_bytes(region, pattern.span()));
  queue_.reset();
  ::munmap(mapped, region.size());
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueLaterTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
