#include "swap/store_files.h"

#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "spillway/units.h"
#include "tests/aio/refused_syscall.h"
#include "tests/swap/store_fixture.h"

namespace spillway::testing {
namespace {

constexpr std::uint64_t kSpaceBytes = 7 * kMiB + 3 * kExtentAlignment;
constexpr std::uint32_t kShares[] = {2, 1, 3};

// Three paths, and the message of whatever opening them says.
struct ThreePaths {
  StoreDirectory directory[3];
  std::vector<std::filesystem::path> paths{directory[0].path(), directory[1].path(), directory[2].path()};

  void make() const {
    StoreFiles files = StoreFiles::create(paths, kShares, kSpaceBytes);
    Superblock block{};
    block.ranks = 1;
    block.total_bytes = kSpaceBytes;
    files.write_superblocks(block);
    files.publish();
  }
  static std::string refusal(const std::vector<std::filesystem::path>& named, Code code) {
    try {
      StoreFiles::open(named, 0);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "no error";
  }
};

void fill(AlignedBuffer& buffer, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& byte : buffer.bytes()) byte = static_cast<std::byte>(random());
}

TEST(StoreFiles, WhatIsWrittenToTheSpaceIsReadBackAfterReopening) {
  ThreePaths three;
  three.make();
  AlignedBuffer out(kSpaceBytes - kExtentAlignment), in(kSpaceBytes - kExtentAlignment);
  fill(out, 1);
  StoreFiles::open(three.paths, 0).write_at(kExtentAlignment, out.bytes());
  const StoreFiles files = StoreFiles::open(three.paths, 0);
  files.read_at(kExtentAlignment, in.bytes());
  EXPECT_EQ(std::memcmp(in.data.get(), out.data.get(), out.size), 0);
  // Byte by byte where place_of() says, which no superblock shares.
  for (std::uint64_t at = kExtentAlignment; at < kSpaceBytes; at += 333 * 1024 + 1) {
    const StoreFiles::FileOffset place = files.place_of(at);
    EXPECT_GE(place.offset, kExtentAlignment);
    std::ifstream file(place.file->path(), std::ios::binary);
    file.seekg(static_cast<std::streamoff>(place.offset));
    EXPECT_EQ(file.get(), std::to_integer<int>(out.data.get()[at - kExtentAlignment])) << at;
  }
}

TEST(StoreFiles, FilesAreAsLargeAsTheirShares) {
  ThreePaths three;
  three.make();
  const auto size = [&](int i) { return std::filesystem::file_size(three.directory[i].file()); };
  EXPECT_EQ(size(0) + size(1) + size(2), disk_bytes(kSpaceBytes, 3));
  EXPECT_LT(size(1), size(0));
  EXPECT_LT(size(0), size(2));
}

TEST(StoreFiles, AMissingPathIsRefused) {
  ThreePaths three;
  three.make();
  const auto& p = three.paths;
  EXPECT_NE(ThreePaths::refusal({p[0], p[1]}, Code::kInvalidArgument).find("is part 1 of 3 of its store, and 2 paths"),
            std::string::npos);
  std::filesystem::remove(three.directory[1].file());
  EXPECT_NE(ThreePaths::refusal(p, Code::kNotFound).find(p[1].string() + ": holds no part of a store"),
            std::string::npos);
}

TEST(StoreFiles, SwappedPathsAreRefused) {
  ThreePaths three;
  three.make();
  const auto& p = three.paths;
  EXPECT_NE(ThreePaths::refusal({p[0], p[2], p[1]}, Code::kInvalidArgument)
                .find(three.directory[2].file().string() + ": is part 3 of its store and named as part 2"),
            std::string::npos);
}

TEST(StoreFiles, PartsOfTwoStoresAreRefused) {
  ThreePaths three, other;
  three.make();
  other.make();
  EXPECT_NE(ThreePaths::refusal({three.paths[0], other.paths[1], three.paths[2]}, Code::kInvalidArgument)
                .find(other.directory[1].file().string() + ": is part of another store than"),
            std::string::npos);
}

TEST(StoreFiles, AFileCutShortIsRefused) {
  ThreePaths three;
  three.make();
  const auto file = three.directory[2].file();
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - kExtentAlignment - 1);
  EXPECT_NE(ThreePaths::refusal(three.paths, Code::kCorrupt).find(file.string() + ": cut short"), std::string::npos);
}

TEST(StoreFiles, AFileThatIsRemovedMovedOrCutIsMissing) {
  ThreePaths three;
  three.make();
  StoreFiles files = StoreFiles::open(three.paths, 0);
  EXPECT_EQ(files.missing(kSpaceBytes), nullptr);
  const auto name = three.directory[1].file();
  std::filesystem::rename(name, three.paths[1] / "elsewhere");
  EXPECT_EQ(files.missing(kSpaceBytes), &files.files()[1]);
  std::ofstream(name) << "another file";
  EXPECT_EQ(files.missing(kSpaceBytes), &files.files()[1]);
  std::filesystem::rename(three.paths[1] / "elsewhere", name);
  EXPECT_EQ(files.missing(kSpaceBytes), nullptr);
  const auto size = std::filesystem::file_size(name);
  std::filesystem::resize_file(name, size - 1);
  EXPECT_EQ(files.missing(kSpaceBytes), &files.files()[1]);
  // What is written beyond a cut makes the file as long as before.
  std::filesystem::resize_file(name, 0);
  std::filesystem::resize_file(name, size);
  EXPECT_EQ(files.missing(kSpaceBytes), &files.files()[1]);
}

TEST(StoreFiles, WhatIsNotPublishedLeavesNothingBehind) {
  ThreePaths three;
  { const StoreFiles files = StoreFiles::create(three.paths, kShares, kSpaceBytes); }
  EXPECT_THROW(StoreFiles::create(three.paths, kShares, std::uint64_t{1} << 60), Error);
  for (const auto& directory : three.directory) EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(StoreFiles, ALeftoverOfARunThatWasCutShortIsReplaced) {
  ThreePaths three;
  std::ofstream(three.paths[1] / (std::string(kStoreFileName) + ".new")) << "half a store";
  three.make();
  EXPECT_EQ(StoreFiles::open(three.paths, 0).superblock().parts, 3u);
}

TEST(StoreFiles, LinksAreNeverFollowed) {
  ThreePaths three;
  const StoreDirectory elsewhere;
  const std::filesystem::path precious = elsewhere.path() / "precious";
  std::ofstream(precious) << "not a store";
  const auto temporary = three.paths[1] / (std::string(kStoreFileName) + ".new");
  for (const auto& target : {precious, elsewhere.path() / "absent"}) {
    std::filesystem::create_symlink(target, temporary);
    EXPECT_THROW(three.make(), Error);
    std::filesystem::remove(temporary);
    EXPECT_TRUE(std::filesystem::is_empty(three.paths[0]));
  }
  three.make();
  std::filesystem::rename(three.directory[2].file(), elsewhere.path() / "moved");
  std::filesystem::create_symlink(elsewhere.path() / "moved", three.directory[2].file());
  EXPECT_NE(ThreePaths::refusal(three.paths, Code::kInvalidArgument).find("symbolic link"), std::string::npos);
  EXPECT_THROW(StoreFiles::open_read_only(three.paths), Error);
  std::string kept;
  std::getline(std::ifstream(precious) >> std::ws, kept);
  EXPECT_EQ(kept, "not a store");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(elsewhere.path()), {}), 2);
}

// What a crash between two names leaves; open() finishes it.
TEST(StoreFiles, WhoLooksSeesASetWhoseFirstFilesHaveNotTheirNamesYet) {
  ThreePaths three, other;
  three.make();
  other.make();
  for (const int i : {0, 1}) {
    std::filesystem::rename(three.directory[i].file(), StoreFiles::temporary_name(three.paths[i]));
  }
  std::filesystem::rename(other.directory[0].file(), three.directory[0].file());  // what was to be replaced
  const auto id_of = [](const StoreFiles& files) { return files.superblock().store_id[0]; };
  const auto id = id_of(StoreFiles::open_read_only(three.paths));
  EXPECT_EQ(StoreFiles::open_read_only(three.paths).files()[1].path(), StoreFiles::temporary_name(three.paths[1]));
  EXPECT_FALSE(std::filesystem::exists(three.directory[1].file())) << "nothing is changed";
  EXPECT_EQ(id_of(StoreFiles::open(three.paths, 0)), id);
  EXPECT_EQ(id_of(StoreFiles::open_read_only(three.paths)), id);
  // Part of another store.
  std::filesystem::rename(other.directory[1].file(), StoreFiles::temporary_name(three.paths[1]));
  EXPECT_EQ(StoreFiles::open_read_only(three.paths).files()[1].path(), three.directory[1].file());
}

// Else a crash could take a temporary name after the last path's new one, and the set would be in two halves.
TEST(StoreFiles, AProcessThatWasKilledBetweenTwoNamesIsWaitedFor) {
  ThreePaths three;
  three.make();
  std::filesystem::rename(three.directory[0].file(), StoreFiles::temporary_name(three.paths[0]));
  File held = File::open(StoreFiles::temporary_name(three.paths[0]), {.writable = true, .direct = false});
  held.lock(0);
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const File released = std::move(held);
  });
  EXPECT_EQ(StoreFiles::open(three.paths, 10).files()[0].path(), three.directory[0].file());
  ends.join();
}

TEST(StoreFiles, NoFileGetsItsNameBeforeAllTemporaryNamesAreDurable) {
  ThreePaths three;
  std::optional<Code> failed;
  bool named = false;
  const bool ran = with_refused_call({.number = SYS_fsync, .error = EIO}, [&] {
    StoreFiles files = StoreFiles::create(three.paths, kShares, kSpaceBytes);
    Superblock block{};
    block.ranks = 1;
    block.total_bytes = kSpaceBytes;
    files.write_superblocks(block);
    try {
      files.publish();
    } catch (const Error& error) {
      failed = error.code();
    }
    named = StoreFiles::exist(three.paths);
  });
  if (!ran) GTEST_SKIP() << "seccomp filters are not permitted here";
  EXPECT_EQ(failed, Code::kIo);
  EXPECT_FALSE(named);
  for (const auto& path : three.paths) EXPECT_TRUE(std::filesystem::is_empty(path));
}

// Who waits for a store and is given the lock of a file that was replaced meanwhile has nothing in its hands.
TEST(StoreFiles, AFileThatWasReplacedWhileItWasWaitedForIsNotTaken) {
  ThreePaths three;
  const std::span<const std::filesystem::path> one(three.paths.data(), 1);
  const auto make = [&] {
    constexpr std::uint32_t kShare[] = {1};
    StoreFiles files = StoreFiles::create(one, kShare, kSpaceBytes);
    Superblock block{};
    block.ranks = 1;
    block.total_bytes = kSpaceBytes;
    files.write_superblocks(block);
    files.publish();
    return files;
  };
  std::optional<StoreFiles> old = make();
  std::optional<StoreFiles> opened;
  std::thread waiting([&] { opened.emplace(StoreFiles::open(one, 30)); });
  std::this_thread::sleep_for(
      std::chrono::milliseconds(50));  // most often it waits by now; either way it must not matter
  std::optional<StoreFiles> replacing = make();
  old.reset();  // the lock that is waited for
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  replacing.reset();
  waiting.join();
  ASSERT_TRUE(opened.has_value());
  EXPECT_TRUE(opened->files().front().at_its_path());
}

// It waits for its names, and the one who made it was killed and has not quite ended.
TEST(StoreFiles, OneWithoutNamesThatAKilledRunStillHoldsIsWaitedFor) {
  ThreePaths three;
  std::optional<StoreFiles> held = StoreFiles::create(three.paths, kShares, kSpaceBytes);
  Superblock block{};
  block.ranks = 1;
  block.total_bytes = kSpaceBytes;
  held->write_superblocks(block);
  held->keep();
  EXPECT_FALSE(StoreFiles::find_waiting(three.paths, StoreFiles::Use::kWrite, 0).has_value());
  std::thread end([&held] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    held.reset();
  });
  EXPECT_TRUE(StoreFiles::find_waiting(three.paths, StoreFiles::Use::kWrite, 30).has_value());
  end.join();
}

// One that a crash left between two names is the named one, though a file of it has a temporary name.
TEST(StoreFiles, OneBetweenTwoNamesIsNotWaitedForAgain) {
  ThreePaths three;
  three.make();
  std::filesystem::rename(three.directory[0].file(), StoreFiles::temporary_name(three.paths[0]));
  const StoreFiles named = StoreFiles::find(three.paths, 0);
  constexpr double kPatience = 1e4;  // longer than the test may take
  EXPECT_FALSE(StoreFiles::find_waiting(three.paths, StoreFiles::Use::kWrite, kPatience).has_value());
}

// A store whose tiles lie in all three, through the queue, its commit and its manifest.
TEST(StoreFiles, ATileStoreLivesInSeveralPaths) {
  ThreePaths three;
  StoreShape shape = three_tiles();
  shape.tiles[0].count = 512 * 1024;
  HostArena arena(8 << 20, kPinnedArena);
  StorePaths paths(three.paths);
  paths.shares = {1, 2, 1};
  {
    auto store = TileStore::create(paths, shape, false);
    auto thread = thread_for(*store, arena);
    for (std::uint64_t step = 0; step <= 2; ++step) {
      write_tiles(*store, shape, *thread, arena, step, step == 0);
      store->commit(step, {}, *thread, arena.memory());
    }
    write_tiles(*store, shape, *thread, arena, 99);
  }
  EXPECT_THROW(TileStore::create(paths, shape, false), Error);
  const auto store = TileStore::open(paths, shape);
  EXPECT_EQ(store->committed().step, 2u);
  expect_tiles(*store, shape, arena, 2);
}

}  // namespace
}  // namespace spillway::testing
