// What a sweep writes at full speed, and where: on files without a name, which /proc still shows.
#include "tools/sweep/sweep_setup.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "spillway/units.h"
#include "tests/temp_directory.h"

namespace spillway::sweep {
namespace {

constexpr std::uint64_t kBytes = 16 * kMiB;  // of a test file
const drive::Watch kToTheEnd = [](double, std::uint64_t) { return true; };
const Way kThreads{IoEngineKind::kThreads, false};

class SweepRig : public testing::Test {
 protected:
  SweepOptions options() {
    SweepOptions options;
    options.paths = {first_.path(), second_.path()};
    options.size_bytes = kBytes;
    options.allow_buffered = true;  // a temporary directory may lie on anything
    return options;
  }

  // Of the file that this process holds open in a directory.
  static std::uint64_t size_in(const TempDirectory& directory) {
    const std::string folder = std::filesystem::canonical(directory.path()).string() + "/";
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code ignored;
      if (!std::filesystem::read_symlink(entry.path(), ignored).string().starts_with(folder)) continue;
      return std::filesystem::file_size(entry.path());
    }
    ADD_FAILURE() << "no file is open in " << folder;
    return 0;
  }

  TempDirectory first_, second_;
};

TEST_F(SweepRig, FullSpeedIsStripedAndEachFileGrowsByItsShare) {
  SweepSetup setup(options());
  setup.fill(1e9, kToTheEnd);
  const double rates[] = {3e9, 1e9};
  EXPECT_EQ(setup.stripe(rates), (std::vector<std::uint32_t>{3, 1}));
  const drive::Sustained sustained = setup.write_sustained({kMiB, 2}, kThreads, 64 * kMiB, kToTheEnd);
  EXPECT_EQ(sustained.written_bytes, 64 * kMiB);
  EXPECT_EQ(sustained.file_bytes, 64 * kMiB);
  EXPECT_EQ(size_in(first_), kBytes + 48 * kMiB);
  EXPECT_EQ(size_in(second_), kBytes + 16 * kMiB);
}

TEST_F(SweepRig, APathWithoutAShareIsNotWrittenTo) {
  SweepSetup setup(options());
  setup.fill(1e9, kToTheEnd);
  const double rates[] = {1, 3e9};
  EXPECT_EQ(setup.stripe(rates), (std::vector<std::uint32_t>{0, 1}));
  const drive::Sustained sustained = setup.write_sustained({kMiB, 2}, kThreads, 64 * kMiB, kToTheEnd);
  EXPECT_EQ(sustained.file_bytes, 64 * kMiB);
  EXPECT_EQ(size_in(first_), kBytes);
  EXPECT_EQ(size_in(second_), kBytes + 64 * kMiB);
}

TEST_F(SweepRig, ASmallAmountGoesOverWhatIsThere) {
  SweepSetup setup(options());
  setup.fill(1e9, kToTheEnd);
  const double rates[] = {1e9, 1e9};
  setup.stripe(rates);
  const drive::Sustained sustained = setup.write_sustained({kMiB, 2}, kThreads, 8 * kMiB, kToTheEnd);
  EXPECT_EQ(sustained.written_bytes, 8 * kMiB);
  EXPECT_EQ(sustained.file_bytes, 2 * kBytes + 8 * kMiB);
}

TEST_F(SweepRig, OnePathIsWrittenAlone) {
  SweepOptions one = options();
  one.paths.pop_back();
  SweepSetup setup(one);
  setup.fill(1e9, kToTheEnd);
  const drive::Sustained sustained = setup.write_sustained({2 * kMiB, 2}, kThreads, 64 * kMiB, kToTheEnd);
  EXPECT_EQ(sustained.file_bytes, 64 * kMiB);
  EXPECT_EQ(size_in(first_), kBytes + 64 * kMiB);
}

}  // namespace
}  // namespace spillway::sweep
