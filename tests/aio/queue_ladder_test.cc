// Every rung of the ladder is taken away as machines take it away, and the queue says what it lost and what that costs.
// A program of its own that nothing runs beside: limits and kernel settings count for more than this process.
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <regex>
#include <thread>

#include "loop_mount.h"
#include "queue_fixture.h"
#include "refused_syscall.h"
#include "spillway/io_queue.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB;

class QueueLadderTest : public QueueFixture {
 protected:
  void SetUp() override {
    open_files(1, 4 * kUnit);
    uring_refusal_ = refusal_of(IoEngineKind::kIoUring);
    libaio_refusal_ = refusal_of(IoEngineKind::kLibaio);
  }

  // Creates a queue, uses it, closes it; returns what it calls itself.
  std::string use_queue(IoEngineKind kind = IoEngineKind::kAuto) {
    const std::span<std::byte> regions[] = {memory_.span()};
    queue_ = IoQueue::create({.engine = kind, .depth = 4}, pointers_, regions);
    const std::string description = queue_->describe();
    expect_transfers_work(memory_);
    queue_.reset();
    return description;
  }

  static void expect_line(const CapturedLog& log, const std::string& pattern) {
    EXPECT_TRUE(std::regex_match(log.all(), std::regex(pattern + "\n"))) << log.all() << "is not\n" << pattern;
  }

  Memory memory_{4 * kUnit};
  std::string uring_refusal_, libaio_refusal_;
};

constexpr RefusedCall kNoUring{.number = SYS_io_uring_setup, .error = EPERM};

TEST_F(QueueLadderTest, WithoutIoUringItIsLibaioAndTheReasonAndPriceAreSaidOnce) {
  if (!libaio_refusal_.empty()) GTEST_SKIP() << libaio_refusal_;
  const std::pair<RefusedCall, const char*> reasons[] = {
      {kNoUring, R"(io_uring: EPERM \(a container's seccomp profile blocks it\); using libaio, about \d+ % more CPU)"},
      {{.number = SYS_io_uring_enter, .error = EPERM},
       R"(io_uring: EPERM \(a container's seccomp profile blocks it\); using libaio, about \d+ % more CPU)"},
      {{.number = SYS_io_uring_setup, .error = ENOSYS},
       R"(io_uring: ENOSYS \(the kernel has no io_uring, or .*\); using libaio, about \d+ % more CPU)"},
      {{.number = SYS_io_uring_setup, .error = ENOMEM},
       R"(io_uring: ENOMEM \(the locked memory limit .*\); using libaio, about \d+ % more CPU)"},
  };
  for (const auto& [call, line] : reasons) {
    CapturedLog log;
    std::string description;
    const bool ran = with_refused_call(call, [&] { description = use_queue(); });
    if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
    EXPECT_EQ(description, "libaio");
    expect_line(log, line);
  }
}

TEST_F(QueueLadderTest, WithoutLibaioTooItIsThreadsAndBothReasonsStandInOneLine) {
  const std::string uring = R"(io_uring: EPERM \(a container's seccomp profile blocks it\); )";
  const std::string threads = R"(; using threads, about \d+ % more CPU)";
  const std::pair<RefusedCall, const char*> losses[] = {
      {{.number = SYS_io_setup, .error = ENOSYS}, R"(libaio: ENOSYS \(the kernel has no AIO, .*\))"},
      {{.number = SYS_io_setup, .error = EAGAIN}, R"(libaio: EAGAIN \(all of fs.aio-max-nr is taken\))"},
      {{.number = SYS_io_submit, .error = EPERM}, R"(libaio: EPERM \(a container's seccomp profile blocks it\))"},
      {{.number = SYS_io_submit, .error = EINVAL}, R"(libaio: the kernel is older than 4.18 .*)"},
  };
  for (const auto& [libaio, reason] : losses) {
    CapturedLog log;
    std::string description;
    const RefusedCall calls[] = {kNoUring, libaio};
    if (!with_refused_calls(calls, [&] { description = use_queue(); })) {
      GTEST_SKIP() << "seccomp filters are not permitted here";
    }
    EXPECT_EQ(description.rfind("threads", 0), 0u) << description;
    expect_line(log, uring + reason + threads);
  }
}

TEST_F(QueueLadderTest, AnEngineAskedForByNameIsHadOrAnError) {
  const auto message_of = [&](IoEngineKind kind) -> std::string {
    try {
      use_queue(kind);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kUnsupported);
      return error.what();
    }
    return "no error";
  };
  std::string uring, libaio;
  const RefusedCall calls[] = {kNoUring, {.number = SYS_io_setup, .error = EPERM}};
  const bool ran = with_refused_calls(calls, [&] {
    uring = message_of(IoEngineKind::kIoUring);
    libaio = message_of(IoEngineKind::kLibaio);
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(uring.rfind("io_uring: EPERM (a container's seccomp profile blocks it); ", 0), 0u) << uring;
  EXPECT_EQ(libaio.rfind("libaio: EPERM (a container's seccomp profile blocks it); ", 0), 0u) << libaio;
}

// Writes a kernel setting that is 0, for as long as it lives. Others that do the same wait: who found another's value
// would leave it behind.
class Sysctl {
 public:
  Sysctl(const char* path, const std::string& value) : path_(path), lock_(::open(path, O_RDONLY | O_CLOEXEC)) {
    if (lock_ < 0 || ::flock(lock_, LOCK_EX) != 0) return;
    std::string before;
    std::ifstream(path) >> before;
    if (before == "0") changed_ = static_cast<bool>(std::ofstream(path) << value << std::flush);
  }
  ~Sysctl() {
    if (changed_) std::ofstream(path_) << "0" << std::flush;
    if (lock_ >= 0) ::close(lock_);
  }
  Sysctl(const Sysctl&) = delete;
  Sysctl& operator=(const Sysctl&) = delete;

  bool changed() const { return changed_; }

 private:
  const char* path_;
  const int lock_;
  bool changed_ = false;
};

TEST_F(QueueLadderTest, TheKernelSettingThatForbidsIoUringIsNamed) {
  if (!uring_refusal_.empty()) GTEST_SKIP() << uring_refusal_;
  if (!libaio_refusal_.empty()) GTEST_SKIP() << libaio_refusal_;
  CapturedLog log;
  {
    const Sysctl disabled("/proc/sys/kernel/io_uring_disabled", "2");
    if (!disabled.changed()) GTEST_SKIP() << "kernel.io_uring_disabled is not there, not 0, or not ours to write";
    queue_ = IoQueue::create({.depth = 4}, pointers_, {});
  }
  EXPECT_EQ(queue_->describe(), "libaio");
  expect_transfers_work(memory_);
  expect_line(log, R"(io_uring: EPERM \(kernel.io_uring_disabled is 2\); using libaio, about \d+ % more CPU)");
}

TEST_F(QueueLadderTest, WithoutRegistrationTheRingStillWorksAndTheCostIsSaid) {
  if (!uring_refusal_.empty()) GTEST_SKIP() << uring_refusal_;
  CapturedLog log;
  std::string description;
  const bool ran = with_refused_call({.number = SYS_io_uring_register, .error = EINVAL},
                                     [&] { description = use_queue(IoEngineKind::kIoUring); });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_NE(description.find("unregistered buffers, unregistered files"), std::string::npos) << description;
  expect_line(log,
              "registered files: EINVAL; plain files, which cost less than 1 % more CPU\n"
              R"(registered buffers \(1 MiB\): EINVAL; plain buffers, about \d+ % more CPU)");
}

// RLIMIT_MEMLOCK for as long as it lives. A limit of the whole process; what counts against it is counted per user.
class LockedMemoryLimit {
 public:
  explicit LockedMemoryLimit(std::uint64_t bytes) {
    ::getrlimit(RLIMIT_MEMLOCK, &before_);
    struct rlimit low = before_;
    low.rlim_cur = std::min<rlim_t>(before_.rlim_max, bytes);
    set_ = ::setrlimit(RLIMIT_MEMLOCK, &low) == 0;
  }
  ~LockedMemoryLimit() { ::setrlimit(RLIMIT_MEMLOCK, &before_); }
  LockedMemoryLimit(const LockedMemoryLimit&) = delete;
  LockedMemoryLimit& operator=(const LockedMemoryLimit&) = delete;

  bool set() const { return set_; }

 private:
  struct rlimit before_;
  bool set_ = false;
};

// Runs `body` on a thread that may not lock more memory than the limit says: as another user than root where this is
// root (the system call itself: libc's function would change every thread), and without the capability in any case.
bool without_privileges(const std::function<void()>& body) {
  bool ran = false;
  std::thread([&] {
    constexpr unsigned kNobody = 65534;
    if (::geteuid() == 0 && ::syscall(SYS_setresuid, kNobody, kNobody, kNobody) != 0) return;
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2];
    if (::syscall(SYS_capget, &header, data) != 0) return;
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    if (::syscall(SYS_capset, &header, data) != 0) return;
    ran = true;
    body();
  }).join();
  return ran;
}

TEST_F(QueueLadderTest, ALockedMemoryLimitCostsTheRegisteredBuffersAndIsNamed) {
  if (!uring_refusal_.empty()) GTEST_SKIP() << uring_refusal_;
  const LockedMemoryLimit limit(64 * kKiB);
  ASSERT_TRUE(limit.set());
  CapturedLog log;
  std::string description;
  if (!without_privileges([&] { description = use_queue(); })) GTEST_SKIP() << "no other user may be had here";
  EXPECT_NE(description.find("unregistered buffers, registered files"), std::string::npos) << description;
  expect_line(log, R"(registered buffers \(1 MiB\): ENOMEM, RLIMIT_MEMLOCK is 64 KiB; plain buffers, about \d+ % more )"
                   R"(CPU; raise it with ulimit -l, LimitMEMLOCK= or CAP_IPC_LOCK)");
}

TEST_F(QueueLadderTest, AClosedQueueGivesItsLockedMemoryBack) {
  if (!uring_refusal_.empty()) GTEST_SKIP() << uring_refusal_;
  // The limit holds one queue and its buffers, not two.
  const LockedMemoryLimit limit(4 * kUnit + 64 * kKiB);
  ASSERT_TRUE(limit.set());
  CapturedLog log;
  const bool ran = without_privileges([&] {
    for (int i = 0; i < 10; ++i) {
      EXPECT_NE(use_queue().find(" registered buffers"), std::string::npos);
    }
  });
  if (!ran) GTEST_SKIP() << "no other user may be had here";
  EXPECT_EQ(log.all(), "");
}

// File systems that take a rung away, mounted for one test.
class QueueMountTest : public QueueLadderTest {
 protected:
  void SetUp() override {
    uring_refusal_ = refusal_of(IoEngineKind::kIoUring);
    libaio_refusal_ = refusal_of(IoEngineKind::kLibaio);
  }
  void TearDown() override {
    queue_.reset();
    files_.clear();
  }
  void mount(const MountOptions& options) {
    mount_.emplace(options);
    if (!mount_->refusal().empty()) GTEST_SKIP() << mount_->refusal();
    files_.push_back(std::make_unique<File>(File::open(*mount_ / "store", kNewFile)));
    files_[0]->preallocate(4 * kUnit);
    pointers_ = {files_[0].get()};
  }

  std::optional<LoopMount> mount_;
};

TEST_F(QueueMountTest, WithoutDirectIoTheFileIsPlainAndLibaioIsRefusedWithTheReason) {
  CapturedLog log;
  mount({.bytes = 32 * kMiB, .mount_options = "data=journal"});
  if (IsSkipped()) return;
  const std::string path = files_[0]->path().string();
  EXPECT_FALSE(files_[0]->direct()) << "statx says zeros";
  EXPECT_EQ(files_[0]->alignment(), 1u);
  EXPECT_EQ(log.count(path + ": the file system does not grant direct I/O"), 1u) << log.all();
  if (uring_refusal_.empty()) {
    EXPECT_EQ(use_queue().rfind("io_uring", 0), 0u);
  }
  EXPECT_EQ(use_queue(IoEngineKind::kThreads).rfind("threads", 0), 0u);
  try {
    use_queue(IoEngineKind::kLibaio);
    FAIL() << "a request would block the submission";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("libaio: " + path + " has no direct I/O", 0), 0u) << error.what();
  }
  std::string description;
  const bool ran = with_refused_call(kNoUring, [&] { description = use_queue(); });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(description.rfind("threads", 0), 0u) << description;
  EXPECT_EQ(log.count("libaio: " + path + " has no direct I/O, so a request would block; using threads, about "), 1u)
      << log.all();
}

TEST_F(QueueMountTest, AnAlignmentOf4096IsFoundAndEveryEngineKeepsIt) {
  mount({.bytes = 32 * kMiB, .sector_bytes = 4096});
  if (IsSkipped()) return;
  EXPECT_TRUE(files_[0]->direct());
  EXPECT_EQ(files_[0]->alignment(), 4096u);
  for (const IoEngineKind kind : kIoEngines) {
    if (!refusal_of(kind).empty()) continue;
    use_queue(kind);
    // Pieces of one sector, and requests that are no whole number of pieces.
    queue_ = IoQueue::create({.engine = kind, .block_bytes = 3 * 4096, .depth = 3}, pointers_, {});
    expect_transfers_work(memory_);
    EXPECT_EQ(transfer(IoOp::kRead, 4096, memory_.span(4096, 5 * 4096)).error, 0);
    queue_.reset();
  }
}

}  // namespace
}  // namespace spillway::testing
