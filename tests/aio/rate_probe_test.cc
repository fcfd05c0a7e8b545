#include "spillway/rate_probe.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>

#include "loop_mount.h"
#include "spillway/error.h"
#include "temp_files.h"

namespace spillway::testing {
namespace {

const IoQueueOptions kOptions{.block_bytes = kMiB, .depth = 8};

TEST(RateProbe, ADriveHasARateAndKeepsNothing) {
  TempDir dir;
  EXPECT_GT(probe_rate(dir.path(), kOptions), 0.0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(RateProbe, AnyBlockSizeWillDo) {
  TempDir dir;
  for (const std::uint64_t block : {4 * kKiB, 48 * kMiB}) {
    EXPECT_GT(probe_rate(dir.path(), {.block_bytes = block, .depth = 64}), 0.0) << block;
  }
}

// Of 512 bytes, read from the drive of a mount since it was made; the rest of the line is for writes and times.
std::uint64_t sectors_read(const LoopMount& mount) {
  struct stat status {};
  EXPECT_EQ(::stat(mount.path().c_str(), &status), 0);
  std::ifstream file("/sys/dev/block/" + std::to_string(major(status.st_dev)) + ":" +
                     std::to_string(minor(status.st_dev)) + "/stat");
  std::uint64_t reads = 0, merged = 0, sectors = 0;
  EXPECT_TRUE(file >> reads >> merged >> sectors);
  return sectors;
}

TEST(RateProbe, EveryByteReadComesFromTheDrive) {
  const LoopMount mount({});
  if (!mount.refusal().empty()) GTEST_SKIP() << mount.refusal();
  const std::uint64_t before = sectors_read(mount);
  probe_rate(mount.path(), kOptions);
  EXPECT_GE((sectors_read(mount) - before) * 512, 3 * 32 * kMiB) << "a half in each of three rounds";
}

TEST(RateProbe, ADirectoryThatIsNotThereIsNamed) {
  TempDir dir;
  try {
    probe_rate(dir / "absent", kOptions);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kNotFound);
    EXPECT_NE(error.parts().object.find((dir / "absent").string()), std::string::npos) << error.what();
  }
}

TEST(RateProbe, AlmostFullIsProbedWithWhatIsLeftAndFullIsAnError) {
  const LoopMount mount({.kind = "tmpfs", .bytes = 8 * kMiB});
  if (!mount.refusal().empty()) GTEST_SKIP() << mount.refusal();
  EXPECT_GT(probe_rate(mount.path(), kOptions), 0.0);
  EXPECT_TRUE(std::filesystem::is_empty(mount.path()));
  File filler = File::open(mount / "filler", {.writable = true, .create = true});
  filler.preallocate(8 * kMiB - 64 * kKiB);
  try {
    probe_rate(mount.path(), kOptions);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().errno_value, ENOSPC);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(mount.path()), {}), 1) << "the filler alone";
}

}  // namespace
}  // namespace spillway::testing
