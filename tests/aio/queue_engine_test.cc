// Which engine a queue gets, what it registers, and what it says when it gets less.
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "aio/queue.h"
#include "queue_fixture.h"
#include "refused_syscall.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;

class QueueEngineTest : public QueueFixture {
 protected:
  void SetUp() override { open_files(1, 4 * kUnit); }

  void expect_transfers_work() {
    Memory out(4 * kUnit);
    out.fill_pattern(1);
    EXPECT_EQ(transfer(IoOp::kWrite, 0, out.span()).error, 0);
    EXPECT_EQ(transfer(IoOp::kSync, 0, {}).error, 0);
    EXPECT_EQ(transfer(IoOp::kRead, 0, memory_.span()).error, 0);
    EXPECT_TRUE(same_bytes(memory_.span(), out.span()));
  }

  Memory memory_{4 * kUnit};
};

// Takes the right to lock any amount of memory from the calling thread.
bool drop_memlock_capability() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2];
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, data) == 0;
}

TEST_F(QueueEngineTest, AutoTakesIoUringAndRegistersFilesAndRegions) {
  if (const std::string refusal = why_no_uring(); !refusal.empty()) GTEST_SKIP() << refusal;
  CapturedLog log;
  const std::span<std::byte> regions[] = {memory_.span()};
  queue_ = IoQueue::create({.depth = 4}, pointers_, regions);
  EXPECT_EQ(queue_->describe().rfind("io_uring", 0), 0u) << queue_->describe();
  if (log.count("not registered") == 0) {
    EXPECT_NE(queue_->describe().find(" registered buffers"), std::string::npos) << queue_->describe();
    EXPECT_NE(queue_->describe().find(" registered files"), std::string::npos) << queue_->describe();
  }
  expect_transfers_work();
}

TEST_F(QueueEngineTest, AutoFallsBackToThreadsAndSaysWhyOnce) {
  for (const int error : {EPERM, ENOSYS, ENOMEM}) {
    CapturedLog log;
    std::string description;
    const bool ran = with_refused_call({.number = SYS_io_uring_setup, .error = error}, [&] {
      queue_ = IoQueue::create({.depth = 4}, pointers_, {});
      description = queue_->describe();
      expect_transfers_work();
      queue_.reset();
    });
    if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
    EXPECT_EQ(description.rfind("threads", 0), 0u) << description;
    EXPECT_EQ(log.count("io_uring: "), 1u) << log.all();
    EXPECT_EQ(log.count(strerrorname_np(error)), 1u) << log.all();
    EXPECT_EQ(log.count("using threads"), 1u) << log.all();
  }
}

TEST_F(QueueEngineTest, AnExplicitIoUringThatIsRefusedIsAnError) {
  std::string message;
  Code code = Code::kIo;
  const bool ran = with_refused_call({.number = SYS_io_uring_setup, .error = EPERM}, [&] {
    try {
      queue_ = IoQueue::create({.engine = IoEngineKind::kIoUring}, pointers_, {});
    } catch (const Error& error) {
      code = error.code();
      message = error.what();
    }
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(code, Code::kUnsupported);
  EXPECT_EQ(message.rfind("io_uring: EPERM (seccomp or kernel.io_uring_disabled blocks it); ", 0), 0u) << message;
}

TEST_F(QueueEngineTest, WithoutRegistrationTheRingStillWorksAndTheCostIsSaid) {
  if (const std::string refusal = why_no_uring(); !refusal.empty()) GTEST_SKIP() << refusal;
  CapturedLog log;
  std::string description;
  const bool ran = with_refused_call({.number = SYS_io_uring_register, .error = EINVAL}, [&] {
    const std::span<std::byte> regions[] = {memory_.span()};
    queue_ = IoQueue::create({.engine = IoEngineKind::kIoUring, .depth = 4}, pointers_, regions);
    description = queue_->describe();
    expect_transfers_work();
    queue_.reset();
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_NE(description.find("unregistered buffers, unregistered files"), std::string::npos) << description;
  EXPECT_EQ(log.count("files not registered: EINVAL"), 1u) << log.all();
  EXPECT_EQ(log.count("buffers not registered: EINVAL"), 1u) << log.all();
}

TEST_F(QueueEngineTest, ALockedMemoryLimitIsNamedWhenBuffersAreNotRegistered) {
  if (const std::string refusal = why_no_uring(); !refusal.empty()) GTEST_SKIP() << refusal;
  struct rlimit before, low;
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_max, 64 * kKiB);
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &low), 0);
  CapturedLog log;
  bool dropped = false;
  std::thread([&] {
    dropped = drop_memlock_capability();
    if (!dropped) return;
    const std::span<std::byte> regions[] = {memory_.span()};
    queue_ = IoQueue::create({.depth = 4}, pointers_, regions);
    expect_transfers_work();
    queue_.reset();
  }).join();
  ::setrlimit(RLIMIT_MEMLOCK, &before);
  if (!dropped) GTEST_SKIP() << "the capability to lock memory could not be dropped";
  EXPECT_EQ(log.count("buffers not registered: ENOMEM"), 1u) << log.all();
  EXPECT_EQ(log.count("ulimit -l"), 1u) << log.all();
}

TEST_F(QueueEngineTest, AClosedQueueGivesItsLockedMemoryBack) {
  if (const std::string refusal = why_no_uring(); !refusal.empty()) GTEST_SKIP() << refusal;
  // The limit holds one queue and its buffers, not two.
  struct rlimit before, low;
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_max, 4 * kUnit + 64 * kKiB);
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &low), 0);
  CapturedLog log;
  bool dropped = false;
  std::thread([&] {
    dropped = drop_memlock_capability();
    const std::span<std::byte> regions[] = {memory_.span()};
    for (int i = 0; dropped && i < 10; ++i) {
      queue_ = IoQueue::create({.depth = 4}, pointers_, regions);
      expect_transfers_work();
      queue_.reset();
    }
  }).join();
  ::setrlimit(RLIMIT_MEMLOCK, &before);
  if (!dropped) GTEST_SKIP() << "the capability to lock memory could not be dropped";
  EXPECT_EQ(log.all(), "");
}

TEST_F(QueueEngineTest, BuffersInsideOutsideAndAcrossRegionsWork) {
  if (const std::string refusal = why_no_uring(); !refusal.empty()) GTEST_SKIP() << refusal;
  // Two neighbouring regions given in the wrong order, and memory after them that belongs to none.
  const std::span<std::byte> regions[] = {memory_.span(2 * kUnit, kUnit), memory_.span(kUnit, kUnit)};
  Memory pattern(2 * kUnit);
  pattern.fill_pattern(1);
  files_[0]->write_at(0, pattern.span());
  queue_ = IoQueue::create({.engine = IoEngineKind::kIoUring, .depth = 4}, pointers_, regions);
  for (std::uint64_t at = 0; at <= 2 * kUnit; at += kUnit / 2) {
    memory_.fill(0);
    ASSERT_EQ(transfer(IoOp::kRead, 0, memory_.span(at, 2 * kUnit)).error, 0) << at;
    ASSERT_TRUE(same_bytes(memory_.span(at, 2 * kUnit), pattern.span())) << at;
  }
}

TEST_F(QueueEngineTest, OptionsThatCannotBeAreErrorsThatNameTheSetting) {
  const auto object_of = [&](IoQueueOptions options) -> std::string {
    try {
      IoQueue::create(options, pointers_, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      return error.parts().object;
    }
    return "no error";
  };
  EXPECT_EQ(object_of({.depth = 0}), "aio.queue_depth");
  EXPECT_EQ(object_of({.depth = 1u << 20}), "aio.queue_depth");
  EXPECT_EQ(object_of({.block_bytes = 0}), "aio.block_size");
  EXPECT_EQ(object_of({.block_bytes = 2 * kGiB}), "aio.block_size");
  if (files_[0]->alignment() > 1) {
    EXPECT_EQ(object_of({.block_bytes = kMiB + 1}), "aio.block_size");
  }
}

}  // namespace
}  // namespace spillway::testing
