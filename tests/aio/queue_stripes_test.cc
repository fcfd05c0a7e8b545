// One striped space over real file systems that differ in everything: ext4, xfs, btrfs and tmpfs, one of them slow, one
// of them small. Mounting them needs root.
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>

#include "loop_mount.h"
#include "queue_fixture.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kUnit = 64 * kKiB, kHeader = 64 * kKiB;
constexpr std::array kKinds = {"ext4", "xfs", "btrfs", "tmpfs"};
constexpr std::size_t kExt4 = 0, kXfs = 1, kBtrfs = 2, kTmpfs = 3;

class QueueStripesTest : public QueueFixture, public ::testing::WithParamInterface<IoEngineKind> {
 protected:
  // Made once for all tests of this program: mkfs takes its time.
  static void SetUpTestSuite() {
    for (const char* kind : kKinds) mounts_.push_back(make_mount(kind));
  }
  static std::unique_ptr<LoopMount> make_mount(const std::string& kind) {
    return std::make_unique<LoopMount>(MountOptions{.kind = kind, .bytes = kind == "tmpfs" ? 12 * kMiB : 320 * kMiB});
  }
  static void TearDownTestSuite() { mounts_.clear(); }

  void SetUp() override {
    if (const std::string refusal = refusal_of(GetParam()); !refusal.empty()) GTEST_SKIP() << refusal;
    for (const auto& mount : mounts_) {
      if (!mount->refusal().empty()) GTEST_SKIP() << mount->refusal();
    }
  }
  void TearDown() override {
    queue_.reset();
    for (const auto& file : files_) std::filesystem::remove(file->path());
    files_.clear();
  }

  void open_members() {
    for (const auto& mount : mounts_) {
      files_.push_back(std::make_unique<File>(File::open(*mount / "store", kNewFile)));
      pointers_.push_back(files_.back().get());
    }
  }
  void preallocate(const StripeMap& stripes, std::uint64_t end) {
    for (std::uint32_t i = 0; i < files_.size(); ++i) files_[i]->preallocate(stripes.file_bytes(i, end));
  }

  // Writes [kHeader, end) of the space in requests of many sizes, syncs, reads it back, and looks at every member.
  void write_and_read_back(const StripeMap& stripes, std::uint64_t end) {
    Memory out(end), in(end);
    out.fill_pattern(1);
    const std::uint64_t sizes[] = {kUnit, 4 * kKiB, 5 * kUnit, 300 * kKiB, 23 * kUnit, 1028 * kKiB};
    for (const IoOp op : {IoOp::kWrite, IoOp::kSync, IoOp::kRead}) {
      std::size_t requests = 0;
      for (std::uint64_t at = kHeader; at < end; ++requests) {
        IoRequest request{.op = op, .file = kStripedSpace};
        if (op == IoOp::kSync) {
          at = end;
        } else {
          request.offset = at;
          request.bytes = std::min(sizes[requests % std::size(sizes)], end - at);
          request.buffer = (op == IoOp::kWrite ? out : in).data() + at;
          at += request.bytes;
        }
        queue_->submit(request);
      }
      for (const IoCompletion& completion : collect(requests)) {
        ASSERT_EQ(completion.error, 0) << "file " << completion.error_file << " at " << completion.error_offset;
      }
    }
    ASSERT_TRUE(same_bytes(in.span(kHeader, end - kHeader), out.span(kHeader, end - kHeader)));
    for (std::uint32_t i = 0; i < files_.size(); ++i) {
      Memory member(files_[i]->size_bytes()), expected(files_[i]->size_bytes());
      for (std::uint64_t at = kHeader; at < end; at += kUnit) {
        if (stripes.file_of(at) != i) continue;
        const StripeMap::Extent place = stripes.next_on(i, at);
        std::copy_n(out.data() + at, std::min(kUnit, end - at), expected.data() + place.file_offset);
      }
      files_[i]->read_at(0, member.span());
      EXPECT_TRUE(same_bytes(member.span(), expected.span())) << "member on " << kKinds[i];
    }
  }

  inline static std::vector<std::unique_ptr<LoopMount>> mounts_;
};

TEST_P(QueueStripesTest, EveryMemberHoldsItsPartOfTheSpace) {
  CapturedLog log;
  open_members();
  const std::uint32_t shares[] = {3, 2, 2, 1};
  const StripeMap stripes(shares, kUnit, kHeader);
  const std::uint64_t end = kHeader + 40 * 8 * kUnit + 3 * kUnit + 8 * kKiB;
  preallocate(stripes, end);
  for (const auto& file : files_) EXPECT_TRUE(file->direct()) << file->path();
  EXPECT_EQ(log.all(), "") << "no file system here needs a word";

  int flags = 0;
  ASSERT_EQ(::ioctl(files_[kBtrfs]->fd(), FS_IOC_GETFLAGS, &flags), 0);
  EXPECT_NE(flags & FS_NOCOW_FL, 0) << "copy-on-write is off where there is any";

  // One of them is slow: each of its results comes half a millisecond late.
  open_queue(GetParam(), {.block_bytes = 128 * kKiB, .depth = 4, .stripes = &stripes},
             {.script = [](const IoPiece& p) { return Fault{.delay_seconds = p.file == kXfs ? 5e-4 : 0}; }});
  write_and_read_back(stripes, end);
  EXPECT_GT(trace_.delays, 0u);
  for (const std::uint32_t file : {0u, 1u, 2u, 3u}) EXPECT_LE(trace_.loads[file].most_bytes, 4 * 128 * kKiB);
}

TEST_P(QueueStripesTest, ASlowerAndASmallerMemberGetTheirShareAndNotTheSame) {
  open_members();
  const std::uint64_t space = 64 * kMiB;
  std::vector<std::uint64_t> room;
  for (const auto& mount : mounts_) {
    struct statvfs free;
    ASSERT_EQ(::statvfs(mount->path().c_str(), &free), 0);
    room.push_back(std::uint64_t{free.f_bavail} * free.f_frsize - kHeader);
  }
  ASSERT_LT(room[kTmpfs], space / 4) << "an equal share would not fit";
  // As measured, say: xfs is half as fast as the others.
  const double rates[] = {2.0, 1.0, 2.0, 2.0};
  const std::vector<std::uint32_t> shares = stripe_shares(rates, room, space, 32);
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_EQ(shares[kExt4], shares[kBtrfs]);
  EXPECT_LT(shares[kXfs], shares[kExt4]) << "the slow one";
  EXPECT_LT(shares[kTmpfs], shares[kExt4]) << "the small one";
  const StripeMap stripes(shares, kUnit, kHeader);
  preallocate(stripes, kHeader + space);  // all of it fits
  EXPECT_LE(files_[kTmpfs]->size_bytes(), room[kTmpfs] + kHeader);
  open_queue(GetParam(), {.block_bytes = kUnit, .depth = 8, .stripes = &stripes}, {});
  write_and_read_back(stripes, kHeader + space);
}

TEST_P(QueueStripesTest, AFullMemberShowsWhenSpaceIsReservedAndNotLater) {
  open_members();
  const std::uint32_t shares[] = {1, 1, 1, 1};
  const StripeMap stripes(shares, kUnit, kHeader);
  try {
    preallocate(stripes, kHeader + 64 * kMiB);
    FAIL() << "16 MiB do not fit";
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().errno_value, ENOSPC);
    EXPECT_EQ(error.parts().object, files_[kTmpfs]->path().string());
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, QueueStripesTest, ::testing::ValuesIn(kIoEngines),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace spillway::testing
