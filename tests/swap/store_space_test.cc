// A store's space on its disk: taken before a run begins, and before anything is lost for it.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "spillway/log.h"
#include "tests/aio/loop_mount.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

std::uint64_t blocks_of(const std::filesystem::path& file) {
  struct stat info {};
  EXPECT_EQ(::stat(file.c_str(), &info), 0);
  return static_cast<std::uint64_t>(info.st_blocks) * 512;
}

// As `cp --sparse=always` and `rsync --sparse` make them.
TEST(StoreSpace, ACopyWithHolesGetsItsSpaceBeforeItsRunBegins) {
  StoreDirectory directory;
  make_store(directory.path(), 3);
  const auto size = std::filesystem::file_size(directory.file());
  std::filesystem::resize_file(directory.file(), size - kExtentAlignment);  // of scratch
  std::filesystem::resize_file(directory.file(), size);
  const auto held = [&] { return blocks_of(directory.file()); };
  ASSERT_LT(held(), size);
  TileStore::open_to_read(directory.path(), three_tiles());
  EXPECT_LT(held(), size) << "who only reads takes no space";

  struct rlimit before, low;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  low = before;
  low.rlim_cur = size - 1;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kIo);
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_LT(held(), size);

  HostArena arena(kArenaBytes, kPinnedArena);
  expect_tiles(*TileStore::open(directory.path(), three_tiles()), three_tiles(), arena, 3);
  EXPECT_GE(held(), size);
}

// XFS wants free space for all that is asked of fallocate, what is there already included.
TEST(StoreSpace, AStoreThatIsWholeNeedsNoFreeSpaceToGoOnOrToBeReplaced) {
  for (const char* kind : {"ext4", "xfs", "btrfs"}) {
    SCOPED_TRACE(kind);
    LoopMount disk({.kind = kind});
    if (!disk.refusal().empty()) GTEST_SKIP() << disk.refusal();
    auto shape = three_tiles();
    shape.scratch_bytes = 8 * kMiB;  // far more than is left
    HostArena arena(kArenaBytes, kPinnedArena);
    const auto commit = [&](TileStore& store, std::uint64_t step) {
      auto thread = thread_for(store, arena);
      write_tiles(store, shape, *thread, arena, step, true);
      store.commit(step, {}, *thread, arena.memory());
    };
    commit(*TileStore::create(disk.path(), shape, false), 7);
    File rest = File::open(disk / "rest", {.writable = true, .create = true, .direct = false});
    off_t size = 0;
    for (off_t more = off_t{1} << 30; more >= off_t{1} << 12; more /= 2) {
      while (::fallocate(rest.fd(), 0, size, more) == 0) size += more;
    }
    ASSERT_LT(free_disk_bytes(disk.path()), kMiB);
    {
      auto store = TileStore::open(disk.path(), shape);
      EXPECT_EQ(store->committed().step, 7u);
      auto thread = thread_for(*store, arena);
      write_tiles(*store, shape, *thread, arena, 8);
      store->commit(8, {}, *thread, arena.memory());
    }
    commit(*TileStore::create(disk.path(), shape, true), 1);
    EXPECT_EQ(TileStore::open(disk.path(), shape)->committed().step, 1u);
  }
}

// A disk that is full, with the blocks of ext4's reserve: what one file gives back, no other gets.
class FullDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!disk_.refusal().empty()) GTEST_SKIP() << disk_.refusal();
    make_store(disk_.path(), 1);
    File rest = File::open(disk_ / "rest", {.writable = true, .create = true, .direct = false});
    off_t size = 0;
    for (off_t more = off_t{1} << 30; more >= off_t{1} << 12; more /= 2) {
      while (::fallocate(rest.fd(), 0, size, more) == 0) size += more;
    }
    ASSERT_EQ(free_disk_bytes(disk_.path()), 0u);
  }
  void commit(TileStore& store, const StoreShape& shape) {
    auto thread = thread_for(store, arena_);
    write_tiles(store, shape, *thread, arena_, 0, true);
    store.commit(0, {}, *thread, arena_.memory());
  }
  std::filesystem::path file() const { return disk_.path() / kStoreFileName; }

  LoopMount disk_{{.kind = "ext4"}};
  HostArena arena_{kArenaBytes, kPinnedArena};
};

TEST_F(FullDisk, AStoreIsReplacedInItsOwnSpace) {
  CapturedLog log;
  StoreShape shape = three_tiles();
  shape.tiles.pop_back();  // smaller, so that its file is cut
  {
    bool asked = false;
    auto store = TileStore::create(disk_.path(), shape, true, [&] {
      asked = true;
      const StoreFiles old = StoreFiles::open_read_only(std::vector{disk_.path()});
      const StoreLayout layout = TileStore::read_layout(old, three_tiles());
      EXPECT_EQ(TileStore::read_records(old, layout).manifest.value().step, 1u);
    });
    EXPECT_TRUE(asked);
    EXPECT_FALSE(std::filesystem::exists(file())) << "there with its first commit";
    commit(*store, shape);
  }
  EXPECT_EQ(log.count("is overwritten now: the disk has no room for the store that replaces it, too"), 1u) << log.all();
  EXPECT_EQ(std::filesystem::file_size(file()), disk_bytes(shape, 1));
  const auto store = TileStore::open(disk_.path(), shape);
  EXPECT_EQ(store->committed().step, 0u);
  expect_tiles(*store, shape, arena_, 0);
}

TEST_F(FullDisk, AStoreStaysWhereTheOneThatReplacesItFindsNoSpace) {
  StoreShape larger = three_tiles();
  larger.scratch_bytes += 64 * kMiB;
  const auto refused = [&](const StoreShape& shape, Code code, const std::function<void()>& before_loss = {}) {
    EXPECT_EQ(code_of([&] { TileStore::create(disk_.path(), shape, true, before_loss); }), code);
    EXPECT_FALSE(std::filesystem::exists(StoreFiles::temporary_name(disk_.path())));
    EXPECT_EQ(TileStore::open(disk_.path(), three_tiles())->committed().step, 1u);
  };
  refused(larger, Code::kIo);
  refused(three_tiles(), Code::kCorrupt, [] { throw Error(Code::kCorrupt, {"a snapshot", "is damaged", 0, "none"}); });

  // What a second name leads to is not the first one's to overwrite.
  std::filesystem::create_hard_link(file(), disk_ / "kept");
  EXPECT_EQ(TileStore::file_bytes(disk_.path()), 0u);
  refused(three_tiles(), Code::kIo);
}

TEST_F(FullDisk, AStoreWithHolesCountsAsWhatItHolds) {
  const auto size = std::filesystem::file_size(file());
  EXPECT_EQ(TileStore::file_bytes(disk_.path()), size);
  std::filesystem::resize_file(file(), size - kExtentAlignment);
  std::filesystem::resize_file(file(), size);
  EXPECT_EQ(TileStore::file_bytes(disk_.path()), size - kExtentAlignment);
}

}  // namespace
}  // namespace spillway
