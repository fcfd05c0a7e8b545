#include "spillway/io_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "loop_mount.h"
#include "refused_syscall.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "temp_files.h"
#include "tests/error_of.h"

namespace spillway::testing {
namespace {

using testing::error_of;

constexpr FileOptions kNew{.writable = true, .create = true, .direct = true};
constexpr FileOptions kNewPlain{.writable = true, .create = true, .direct = false};

TEST(FileOpen, ANewFileIsPrivateAndEmpty) {
  TempDir dir;
  const File file = File::open(dir / "store", kNew);
  struct stat status;
  ASSERT_EQ(::fstat(file.fd(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  EXPECT_EQ(file.size_bytes(), 0u) << "finding the alignment must leave nothing behind";
  EXPECT_NE(::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(FileOpen, CreateRefusesAFileThatExists) {
  TempDir dir;
  std::ofstream(dir / "store") << "precious";
  const Error error = error_of([&] { File::open(dir / "store", kNew); });
  EXPECT_EQ(error.code(), Code::kExists);
  EXPECT_EQ(error.parts().errno_value, EEXIST);
  EXPECT_EQ(std::filesystem::file_size(dir / "store"), 8u);
}

TEST(FileOpen, ASymbolicLinkIsRefusedForOpenAndForCreate) {
  TempDir dir;
  std::ofstream(dir / "target") << "precious";
  std::filesystem::create_symlink(dir / "target", dir / "link");
  std::filesystem::create_symlink(dir / "nowhere", dir / "dangling");
  EXPECT_EQ(error_of([&] { File::open(dir / "link", {.writable = true}); }).parts().errno_value, ELOOP);
  EXPECT_EQ(error_of([&] { File::open(dir / "dangling", kNew); }).code(), Code::kExists);
  EXPECT_FALSE(std::filesystem::exists(dir / "nowhere"));
}

TEST(FileOpen, AMissingFileAndADirectoryAreNamed) {
  TempDir dir;
  const Error missing = error_of([&] { File::open(dir / "absent", {}); });
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_EQ(missing.parts().object, (dir / "absent").string());
  EXPECT_EQ(error_of([&] { File::open(dir.path(), {}); }).code(), Code::kInvalidArgument);
}

TEST(FileOpen, APipeIsRefusedAtOnceAndNoFileIsLeftNonblocking) {
  TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  ::alarm(60);  // ends the test where opening waits for a writer
  const Error error = error_of([&] { File::open(dir / "pipe", {}); });
  ::alarm(0);
  EXPECT_STREQ(error.what(), ((dir / "pipe").string() + ": is not a regular file; name a file").c_str());
  std::ofstream(dir / "file") << "text";
  EXPECT_EQ(::fcntl(File::open(dir / "file", {}).fd(), F_GETFL) & O_NONBLOCK, 0);
}

TEST(FileDirect, TransfersAtTheStatedAlignmentWork) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  if (!file.direct()) GTEST_SKIP() << "no direct I/O on " << dir.path();
  const std::uint32_t unit = file.alignment();
  EXPECT_EQ(unit & (unit - 1), 0u);
  EXPECT_GE(unit, 512u);
  Memory out(4 * unit), in(4 * unit);
  out.fill_pattern(1);
  file.write_at(unit, out.span(unit, 2 * unit));
  file.read_at(unit, in.span(unit, 2 * unit));
  EXPECT_TRUE(same_bytes(in.span(unit, 2 * unit), out.span(unit, 2 * unit)));
}

// Linux asks for a sector's alignment in the file, and for 512 bytes or less in memory.
TEST(FileDirect, SectorsLargerThanAPageAskForNoMoreOfAddresses) {
  const LoopMount mount({.kind = "xfs", .sector_bytes = 16384});
  if (!mount.refusal().empty()) GTEST_SKIP() << mount.refusal();
  File file = File::open(mount / "store", kNew);
  ASSERT_TRUE(file.direct());
  ASSERT_EQ(file.alignment(), 16384u);
  ASSERT_LE(file.memory_alignment(), 4096u);
  Memory out(65536), in(65536);
  out.fill_pattern(1);
  file.write_at(16384, out.span(4096, 32768));
  file.read_at(16384, in.span(8192, 32768));
  EXPECT_TRUE(same_bytes(in.span(8192, 32768), out.span(4096, 32768)));
}

TEST(FileDirect, AProbeFindsAnAlignmentWhereStatxDoesNotSay) {
  for (const int error : {ENOSYS, EINVAL}) {
    TempDir dir;
    bool direct = false, reopened_direct = false;
    std::uint32_t alignment = 0, stated = 0, reopened = 0;
    std::uint64_t size = 1;
    {
      const File file = File::open(dir / "stated", kNew);
      stated = file.alignment();
      direct = file.direct();
    }
    if (!direct) GTEST_SKIP() << "no direct I/O on " << dir.path();
    const bool ran = with_refused_call({.number = SYS_statx, .error = error}, [&] {
      File file = File::open(dir / "probed", kNew);
      alignment = file.alignment();
      size = file.size_bytes();
      Memory page(65536);
      for (std::uint64_t at = 0; at < 4; ++at) file.write_at(at * 65536, page.span());
      const File again = File::open(dir / "probed", {});
      reopened_direct = again.direct();
      reopened = again.alignment();
    });
    if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
    EXPECT_EQ(alignment, stated);
    EXPECT_EQ(size, 0u);
    EXPECT_TRUE(reopened_direct);
    EXPECT_EQ(reopened, stated) << "a file with bytes is probed by reading";
  }
}

TEST(FileDirect, WithoutDirectIoTheFileIsPlainAndTheCostIsSaid) {
  TempDir dir;
  CapturedLog log;
  bool direct = true;
  std::uint32_t alignment = 0;
  const bool ran =
      with_refused_call({.number = SYS_fcntl, .error = EINVAL, .second_argument = std::uint32_t{F_SETFL}}, [&] {
        File file = File::open(dir / "store", kNew);
        direct = file.direct();
        alignment = file.alignment();
        Memory odd(1001);
        odd.fill_pattern(1);
        file.write_at(3, odd.span());
      });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_FALSE(direct);
  EXPECT_EQ(alignment, 1u);
  EXPECT_EQ(log.count("does not grant direct I/O"), 1u) << log.all();
}

TEST(FileTransfer, AReadPastTheEndIsAnErrorWithItsPlace) {
  TempDir dir;
  File file = File::open(dir / "store", kNewPlain);
  Memory bytes(5000);
  file.write_at(0, bytes.span());
  const Error error = error_of([&] { file.read_at(4096, bytes.span()); });
  EXPECT_EQ(error.parts().errno_value, ENODATA);
  EXPECT_NE(std::string(error.what()).find("at offset 5000"), std::string::npos) << error.what();
}

TEST(FileTransfer, AFileMayEndBehindTheBytesThatAReadNeeds) {
  TempDir dir;
  File::open(dir / "store", kNewPlain).write_at(0, Memory(5000).span());
  for (const bool direct : {true, false}) {
    const File file = File::open(dir / "store", {.direct = direct});
    Memory in(65536);
    in.fill(7);
    EXPECT_NO_THROW(file.read_at(0, in.span(), 5000)) << direct;
    EXPECT_EQ(in.data()[4999], std::byte{0});
    EXPECT_NO_THROW(file.read_at(0, in.span(), 0)) << direct;
    EXPECT_NO_THROW(file.read_at(8192, in.span(), 0)) << direct;
    EXPECT_EQ(error_of([&] { file.read_at(0, in.span(), 5001); }).parts().errno_value, ENODATA) << direct;
    EXPECT_EQ(error_of([&] { file.read_at(0, in.span()); }).parts().errno_value, ENODATA) << direct;
  }
}

TEST(FileTransferDeathTest, AnUnalignedDirectTransferIsAProgrammerError) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  if (!file.direct()) GTEST_SKIP() << "no direct I/O on " << dir.path();
  Memory bytes(65536);
  const std::uint32_t unit = file.alignment();
  EXPECT_DEATH(file.read_at(1, bytes.span(0, unit)), "must be multiples");
  EXPECT_DEATH(file.read_at(0, bytes.span(0, unit + 1)), "must be multiples");
  EXPECT_DEATH(file.read_at(0, bytes.span(1, unit)), "must be multiples");
}

TEST(FilePreallocate, ReservesTheSpaceAndKeepsTheBytes) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  file.preallocate(kMiB);
  Memory out(65536), in(65536);
  out.fill_pattern(1);
  file.write_at(65536, out.span());
  file.preallocate(8 * kMiB);
  file.preallocate(kMiB);  // less than it has: nothing to do
  EXPECT_EQ(file.size_bytes(), 8 * kMiB);
  struct stat status;
  ASSERT_EQ(::fstat(file.fd(), &status), 0);
  EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, 8 * kMiB);
  file.read_at(65536, in.span());
  EXPECT_TRUE(same_bytes(in.span(), out.span()));
}

TEST(FilePreallocate, WritesZerosWhereTheFileSystemCannotReserve) {
  TempDir dir;
  CapturedLog log;
  const std::uint64_t bytes = 3 * kMiB + 12345;
  std::uint64_t size = 0, shrunk = 0, blocks = 0;
  bool kept = false;
  const bool ran = with_refused_call({.number = SYS_fallocate, .error = EOPNOTSUPP}, [&] {
    File file = File::open(dir / "store", kNew);
    Memory out(65536), in(65536);
    out.fill_pattern(1);
    file.write_at(0, out.span());
    file.preallocate(bytes);
    size = file.size_bytes();
    file.preallocate(kMiB);
    shrunk = file.size_bytes();
    struct stat status;
    if (::fstat(file.fd(), &status) == 0) blocks = static_cast<std::uint64_t>(status.st_blocks) * 512;
    file.read_at(0, in.span());
    kept = same_bytes(in.span(), out.span());
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(size, bytes);
  EXPECT_EQ(shrunk, bytes);
  EXPECT_GE(blocks, bytes);
  EXPECT_TRUE(kept);
  EXPECT_EQ(log.count("writing"), 1u) << log.all();
}

TEST(FilePreallocate, ReservingWritesNoZeros) {
  TempDir dir;
  std::uint64_t size = 0;
  bool reserved = true;
  const bool ran = with_refused_call({.number = SYS_fallocate, .error = EOPNOTSUPP}, [&] {
    File file = File::open(dir / "store", kNew);
    reserved = file.reserve(kMiB);
    size = file.size_bytes();
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_FALSE(reserved);
  EXPECT_EQ(size, 0u);
}

TEST(FilePreallocate, MoreThanTheDriveHoldsIsRefusedWithBytesAskedAndFree) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  file.preallocate(kMiB);
  const std::uint64_t absurd = std::uint64_t{1} << 43;
  const Error error = error_of([&] { file.preallocate(absurd); });
  EXPECT_EQ(error.code(), Code::kIo);
  EXPECT_EQ(error.parts().errno_value, ENOSPC);
  EXPECT_NE(error.parts().happened.find(std::to_string(absurd)), std::string::npos) << error.what();
  EXPECT_NE(error.parts().happened.find("are free"), std::string::npos) << error.what();
  EXPECT_EQ(file.size_bytes(), kMiB);
}

TEST(FilePreallocate, AFileSizeLimitIsAnErrorAndNotASignal) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  struct rlimit before, low;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  low = before;
  low.rlim_cur = kMiB;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Error error = error_of([&] { file.preallocate(2 * kMiB); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(error.parts().errno_value, EFBIG);
  EXPECT_EQ(file.size_bytes(), 0u);
}

TEST(FileRename, WithoutADescriptorForItsDirectoryItNamesTheLimit) {
  TempDir dir;
  File file = File::open(dir / "new", kNew);
  struct rlimit before, low;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  low = before;
  low.rlim_cur = static_cast<rlim_t>(file.fd());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const Error error = error_of([&] { file.rename_to(dir / "store"); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(error.parts().errno_value, EMFILE);
  EXPECT_EQ(error.parts().hint, "raise ulimit -n");
}

// A file system of 4 MiB, mounted for one test.
class SmallMount : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::mount("tmpfs", dir_.path().c_str(), "tmpfs", 0, "size=4m") != 0) {
      GTEST_SKIP() << "mounting a small tmpfs is not permitted: " << std::strerror(errno);
    }
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) ::umount2(dir_.path().c_str(), MNT_DETACH);
  }
  TempDir dir_;
  bool mounted_ = false;
};

TEST_F(SmallMount, AFullFileSystemIsRefusedAtPreallocateAndTheSizeStays) {
  File file = File::open(dir_ / "store", kNew);
  file.preallocate(kMiB);
  const Error error = error_of([&] { file.preallocate(16 * kMiB); });
  EXPECT_EQ(error.parts().errno_value, ENOSPC);
  EXPECT_EQ(file.size_bytes(), kMiB);
  file.preallocate(3 * kMiB);
  EXPECT_EQ(file.size_bytes(), 3 * kMiB);
}

TEST_F(SmallMount, WritingZerosIntoAFullFileSystemGivesTheSpaceBack) {
  // statfs is refused too, so that the writing itself meets the end of the space.
  int error = 0;
  std::uint64_t size = 0;
  bool inner_ran = false;
  const bool ran = with_refused_call({.number = SYS_fallocate, .error = EOPNOTSUPP}, [&] {
    inner_ran = with_refused_call({.number = SYS_fstatfs, .error = ENOSYS}, [&] {
      File file = File::open(dir_ / "store", kNew);
      file.preallocate(kMiB);
      error = error_of([&] { file.preallocate(16 * kMiB); }).parts().errno_value;
      size = file.size_bytes();
    });
  });
  if (!ran || !inner_ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(error, ENOSPC);
  EXPECT_EQ(size, kMiB);
}

TEST_F(SmallMount, TmpfsTakesDirectIoOrSaysThatItDoesNot) {
  CapturedLog log;
  File file = File::open(dir_ / "store", kNew);
  EXPECT_EQ(log.count("does not grant"), file.direct() ? 0u : 1u) << log.all();
  Memory out(65536), in(65536);
  out.fill_pattern(1);
  file.write_at(0, out.span());
  file.read_at(0, in.span());
  EXPECT_TRUE(same_bytes(in.span(), out.span()));
}

TEST(FileLock, ASecondDescriptionIsBusyUntilTheFirstIsClosed) {
  TempDir dir;
  auto first = std::make_unique<File>(File::open(dir / "store", kNew));
  File second = File::open(dir / "store", {.writable = true});
  first->lock(0);
  const Error error = error_of([&] { second.lock(0); });
  EXPECT_EQ(error.code(), Code::kBusy);
  EXPECT_NE(std::string(error.what()).find("in use"), std::string::npos);
  // A process-wide lock would be lost with the first descriptor of the file that is closed.
  { File third = File::open(dir / "store", {}); }
  EXPECT_EQ(error_of([&] { second.lock(0); }).code(), Code::kBusy);
  first.reset();
  second.lock(0);
}

TEST(FileLock, TheLockOfAProcessEndsWithItAndPatienceSeesThat) {
  TempDir dir;
  File mine = File::open(dir / "store", kNew);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    File theirs = File::open(dir / "store", {.writable = true});
    theirs.lock(0);
    if (::write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(error_of([&] { mine.lock(0.05); }).code(), Code::kBusy);
  CapturedLog log;
  EXPECT_EQ(error_of([&] { mine.lock(1); }).code(), Code::kBusy);
  EXPECT_EQ(log.count("in use by another engine or process; waiting 1 s at most for its end"), 1u) << log.all();
  ::kill(child, SIGKILL);
  mine.lock(60);  // returns as soon as the kernel has cleaned up
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(FileSync, AFailedSyncIsFinal) {
  TempDir dir;
  File file = File::open(dir / "store", kNew);
  file.sync();
  bool refused = false;
  const bool ran = with_refused_call({.number = SYS_fdatasync, .error = EIO},
                                     [&] { refused = error_of([&] { file.sync(); }).parts().errno_value == EIO; });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_TRUE(refused);
  // The drive is well again: the file must not be.
  EXPECT_EQ(error_of([&] { file.sync(); }).parts().errno_value, EIO);
}

}  // namespace
}  // namespace spillway::testing
