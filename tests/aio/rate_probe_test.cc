#include "aio/rate_probe.h"

#include <gtest/gtest.h>

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
