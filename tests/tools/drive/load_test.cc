// The load on a small file: counts, ratio of reads to writes, limits, stripes. No rate is asserted.
#include "tools/drive/load.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "spillway/error.h"
#include "spillway/units.h"
#include "tests/temp_directory.h"
#include "tools/drive/test_file.h"

namespace spillway::drive {
namespace {

constexpr std::uint64_t kBytes = 16 * kMiB;

class DriveLoad : public testing::Test {
 protected:
  TestFile filled_file(std::uint64_t bytes = kBytes) {
    TestFile file(directory_.path(), bytes);
    file.fill(memory_.bytes(), 1e9, 0, [](double, std::uint64_t) { return true; });
    return file;
  }

  TempDirectory directory_;
  LoadMemory memory_{16 * kMiB};
};

TEST_F(DriveLoad, TestFileLeavesNoName) {
  TestFile file = filled_file();
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  EXPECT_EQ(file.filled_bytes(), kBytes);
  EXPECT_EQ(file.file().size_bytes(), kBytes);
  struct stat status {};
  ASSERT_EQ(::fstat(file.file().fd(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(DriveLoad, FillStopsInTimeButNotBeforeTheLeast) {
  TestFile file(directory_.path(), kBytes);
  file.fill(memory_.bytes(), 0, 9 * kMiB, [](double, std::uint64_t) { return true; });
  EXPECT_GE(file.filled_bytes(), 9 * kMiB);
  EXPECT_LE(file.filled_bytes(), kBytes);
}

TEST_F(DriveLoad, MixedMovesBytesInTheRatioAskedFor) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = 64 * kKiB, .depth = 4, .read_parts = 14, .write_parts = 12};
  spec.most_bytes = 26 * 20 * 64 * kKiB;
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_EQ(result.read_bytes, 14 * 20 * 64 * kKiB);
  EXPECT_EQ(result.written_bytes, 12 * 20 * 64 * kKiB);
  EXPECT_EQ(result.written_in_all, result.written_bytes);
  EXPECT_EQ(result.latencies_us.size(), 26u * 20);
  EXPECT_GT(result.seconds, 0);
  EXPECT_LE(result.latency_us(0.5), result.latency_us(0.99));
}

TEST_F(DriveLoad, WritesKeepToTheirLimitWarmUpIncluded) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = 256 * kKiB, .depth = 4, .read_parts = 0, .write_parts = 1};
  spec.warmup_seconds = 1e-6;
  spec.most_written_bytes = 5 * kMiB;
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_EQ(result.written_in_all, 5 * kMiB);
  EXPECT_LT(result.written_bytes, result.written_in_all);  // the warm-up is not counted
}

TEST_F(DriveLoad, LimitOfBytesDoesNotEndItInsideTheWarmUp) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = 256 * kKiB, .depth = 4, .read_parts = 14, .write_parts = 12};
  spec.warmup_seconds = 1e6;
  spec.most_written_bytes = 4 * kMiB;
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_GT(result.rate(), 0);
  EXPECT_LE(result.written_in_all, 4 * kMiB);
}

TEST_F(DriveLoad, EndsEarlyWhenToldTo) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = 256 * kKiB, .depth = 2};
  spec.go_on = [](double, std::uint64_t bytes) { return bytes < 2 * kMiB; };
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_TRUE(result.ended_early);
  EXPECT_GE(result.read_bytes, 2 * kMiB);
}

TEST_F(DriveLoad, HeldItGoesOnUncountedBehindItsWindow) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = 64 * kKiB, .depth = 2};
  spec.warmup_seconds = spec.seconds = 1e-6;
  std::uint64_t moved = 0;
  int begun = 0;
  spec.begin = [&] { begun += moved == 0 ? 1 : 2; };
  spec.go_on = [&](double, std::uint64_t bytes) {
    moved = bytes;
    return true;
  };
  spec.hold = [&] { return moved < 8 * kMiB; };
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_EQ(begun, 1);
  EXPECT_FALSE(result.ended_early);
  EXPECT_GE(result.moved_in_all, 8 * kMiB);
  EXPECT_GT(result.read_bytes, 0u);
  EXPECT_LT(result.read_bytes, kMiB);  // a few requests
  EXPECT_EQ(result.latencies_us.size(), result.read_bytes / (64 * kKiB));
}

TEST_F(DriveLoad, EveryEngineReadsWhatWasFilled) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), kBytes, 0}};
  for (const IoEngineKind engine : kIoEngines) {
    for (const bool fixed : {true, false}) {
      LoadSpec spec{.engine = engine, .fixed_buffers = fixed, .block_bytes = 512 * kKiB, .depth = 3};
      spec.most_bytes = 2 * kBytes;
      try {
        const LoadResult result = run_load(files, memory_.bytes(), spec);
        EXPECT_EQ(result.read_bytes, 2 * kBytes) << result.engine;
        EXPECT_TRUE(fixed || !result.fixed_buffers);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kUnsupported) << error.what();
      }
    }
  }
}

TEST_F(DriveLoad, StripedFilesTakeTheirShares) {
  TestFile fast = filled_file(), slow = filled_file();
  const std::uint32_t shares[] = {3, 1};
  const StripeMap stripes(shares, kMiB, 0);
  const LoadFile files[] = {{&fast.file(), kBytes, 0}, {&slow.file(), kBytes, 0}};
  LoadSpec spec{.block_bytes = kMiB, .depth = 2, .read_parts = 14, .write_parts = 12};
  spec.stripes = &stripes;
  spec.space_bytes = 16 * kMiB;
  spec.most_bytes = 400 * kMiB;
  const LoadResult result = run_load(files, memory_.bytes(), spec);
  EXPECT_EQ(result.read_bytes + result.written_bytes, 400 * kMiB);
}

TEST_F(DriveLoad, WritesBeginWhereToldTo) {
  TestFile file(directory_.path(), 8 * kMiB);
  const LoadFile files[] = {{&file.file(), 8 * kMiB, 4 * kMiB}};
  LoadSpec spec{.block_bytes = kMiB, .depth = 1, .read_parts = 0, .write_parts = 1};
  spec.most_bytes = 6 * kMiB;  // once around, and half again
  run_load(files, memory_.bytes(), spec);
  LoadMemory read(8 * kMiB);
  file.file().read_at(0, read.bytes());
  for (std::uint64_t at = 0; at < 4 * kMiB; at += 4096) ASSERT_EQ(read.bytes()[at], std::byte{0}) << at;
  EXPECT_TRUE(std::equal(memory_.bytes().begin(), memory_.bytes().begin() + kMiB, read.bytes().begin() + 4 * kMiB));
}

TEST_F(DriveLoad, StripesBeginInEachFileWhereToldTo) {
  TestFile fast(directory_.path(), 14 * kMiB), slow(directory_.path(), 12 * kMiB);
  const std::uint32_t shares[] = {3, 1};
  const StripeMap stripes(shares, kMiB, 0);
  const LoadFile files[] = {{&fast.file(), 14 * kMiB, 2 * kMiB}, {&slow.file(), 12 * kMiB, 8 * kMiB}};
  LoadSpec spec{.block_bytes = kMiB, .depth = 1, .read_parts = 0, .write_parts = 1};
  spec.stripes = &stripes;
  spec.space_bytes = 16 * kMiB;
  spec.most_bytes = 64 * kMiB;  // four times over
  run_load(files, memory_.bytes(), spec);
  for (const LoadFile& file : files) {
    LoadMemory read(file.bytes);
    file.file->read_at(0, read.bytes());
    for (std::uint64_t at = 0; at < file.bytes; at += kMiB) {
      const auto found = read.bytes().subspan(at, 4096);
      EXPECT_EQ(std::ranges::all_of(found, [](std::byte b) { return b == std::byte{0}; }), at < file.begin) << at;
    }
  }
}

TEST_F(DriveLoad, FileThatEndsEarlyIsAnErrorThatNamesIt) {
  TestFile file = filled_file();
  const LoadFile files[] = {{&file.file(), 2 * kBytes, 0}};
  LoadSpec spec{.block_bytes = kMiB, .depth = 2};
  spec.most_bytes = 2 * kBytes;
  try {
    run_load(files, memory_.bytes(), spec);
    FAIL() << "read beyond the end of a file";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kIo);
    EXPECT_NE(std::string(error.what()).find("offset 16777216"), std::string::npos) << error.what();
  }
}

TEST(DriveMedian, OfAnEvenNumberIsTheMean) {
  EXPECT_DOUBLE_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(median({}), 0);
}

}  // namespace
}  // namespace spillway::drive
