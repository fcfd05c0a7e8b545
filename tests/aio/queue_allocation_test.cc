// The data path takes no memory after creation. A program of its own, because it counts every allocation in it.
#include "queue_fixture.h"
#include "spillway/io_queue.h"
#include "tests/heap_watch.h"

namespace spillway::testing {
namespace {

class QueueAllocationTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {};

TEST_P(QueueAllocationTest, NothingIsAllocatedAfterCreation) {
  if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
  open_files(2, 4 * kMiB);
  Memory memory(4 * kMiB);
  const std::span<std::byte> regions[] = {memory.span()};
  const std::uint32_t shares[] = {2, 1};
  const StripeMap stripes(shares, 64 * kKiB, 0);
  queue_ = IoQueue::create(
      {.engine = GetParam(), .block_bytes = 64 * kKiB, .depth = 8, .max_requests = 64, .stripes = &stripes}, pointers_,
      regions);
  std::uint64_t submitted = 0, completed = 0, errors = 0;
  const auto round = [&] {
    for (std::uint64_t i = 0; i < 256; ++i) {
      queue_->submit({.op = i % 3 ? IoOp::kRead : IoOp::kWrite,
                      .file = i % 2 ? kStripedSpace : 0,
                      .offset = i % 16 * 256 * kKiB,
                      .buffer = memory.data() + i % 16 * 256 * kKiB,
                      .bytes = 256 * kKiB,
                      .tag = i});
      const std::size_t may_wait = i % 16 == 15 ? 0 : 8;  // then each buffer is used again
      do {
        IoCompletion out[4];
        for (const IoCompletion& completion : queue_->wait(out, queue_->pending() > may_wait ? -1 : 0)) {
          ++completed;
          errors += completion.error != 0;
        }
      } while (queue_->pending() > may_wait);
    }
    submitted += 256;
  };
  EXPECT_EQ(allocations_of(round), 0u);
  EXPECT_EQ(completed, submitted);
  EXPECT_EQ(errors, 0u);
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueAllocationTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
