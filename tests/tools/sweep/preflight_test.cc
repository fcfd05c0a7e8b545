// How large a test is, and what is said of a drive that has a cache.
#include "tools/sweep/preflight.h"

#include <gtest/gtest.h>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway::sweep {
namespace {

TEST(SweepPreflight, TestSizeFollowsTheFreeSpace) {
  PathInfo facts;
  facts.path = "/somewhere";
  facts.free_bytes = 100 * kGiB;
  EXPECT_EQ(test_bytes(facts, 0), 2 * kGiB);
  facts.drive.bytes = 4000 * kGiB;
  EXPECT_GE(test_bytes(facts, 0), 8 * kGiB);  // beyond twice the cache that such a drive may have
  facts.free_bytes = 400 * kMiB;
  EXPECT_LE(test_bytes(facts, 0), 100 * kMiB);
  EXPECT_EQ(test_bytes(facts, 64 * kMiB), 64 * kMiB);
  EXPECT_THROW(test_bytes(facts, 500 * kMiB), Error);
  EXPECT_THROW(test_bytes(facts, kMiB), Error);
  facts.free_bytes = 10 * kMiB;
  EXPECT_THROW(test_bytes(facts, 0), Error);
}

TEST(SweepPreflight, SmallTestOnALargeDriveIsWarnedOf) {
  PathInfo facts;
  facts.drive.bytes = 2000 * kGiB;
  warn_of_caches(facts, 16 * kGiB);
  EXPECT_TRUE(facts.warnings.empty());
  warn_of_caches(facts, kGiB);
  EXPECT_EQ(facts.warnings.size(), 1u);
}

}  // namespace
}  // namespace spillway::sweep
