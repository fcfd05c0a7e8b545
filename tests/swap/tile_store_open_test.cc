// What opening a store finds, mends and refuses, and who makes one at the same time.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "spillway/log.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

std::string with_log(const std::function<void()>& work) {
  std::string said;
  set_log_sink([&said](LogLevel, std::string_view message) { said += std::string(message) + "\n"; });
  work();
  set_log_sink({});
  return said;
}

TEST(TileStoreOpen, EitherSuperblockSufficesAndTheOtherIsWrittenAnew) {
  for (const bool first : {true, false}) {
    StoreDirectory directory;
    make_store(directory.path(), 2);
    const std::uint64_t end = std::filesystem::file_size(directory.file());
    directory.damage(first ? 30 : end - kExtentAlignment + 30);
    const std::filesystem::path paths[] = {directory.path()};
    EXPECT_TRUE(StoreFiles::open_read_only(paths).superblock_damaged(0));  // and stays
    EXPECT_EQ(TileStore::open_to_read(directory.path(), three_tiles())->committed().step, 2u);
    const std::string said = with_log([&] {
      EXPECT_TRUE(StoreFiles::open_read_only(paths).superblock_damaged(0));
      EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);
    });
    EXPECT_NE(said.find("one of its two superblocks was damaged and is written anew"), std::string::npos) << said;
    EXPECT_FALSE(StoreFiles::open_read_only(paths).superblock_damaged(0));
    EXPECT_EQ(std::filesystem::file_size(directory.file()), end);
    EXPECT_EQ(with_log([&] { TileStore::open(directory.path(), three_tiles()); }), "");
    directory.damage(30);
    directory.damage(end - kExtentAlignment + 30);
    EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
  }
}

// A flipped bit of the version's number is damage like any other. What differs in more is another version's, and stays.
TEST(TileStoreOpen, ANewerSuperblockIsNoDamage) {
  for (const bool first : {true, false}) {
    StoreDirectory directory;
    make_store(directory.path(), 2);
    const std::uint64_t at = first ? 0 : std::filesystem::file_size(directory.file()) - kExtentAlignment;
    directory.damage(at + offsetof(Superblock, format_version));
    EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);
    directory.damage(at + offsetof(Superblock, format_version));
    directory.damage(at + 30);
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kUnsupported);
    }
  }
}

TEST(TileStoreOpen, AStoreIsOfOneRank) {
  StoreDirectory directory;
  StoreShape shape = three_tiles();
  shape.identity.rank = {.index = 1, .count = 2};
  make_store(directory.path(), 2, shape);
  const auto open = [&](Rank rank) {
    shape.identity.rank = rank;
    return TileStore::open(directory.path(), shape)->committed().step;
  };
  EXPECT_EQ(open({1, 2}), 2u);
  for (const Rank other : {Rank{}, Rank{0, 2}, Rank{1, 3}}) {
    try {
      open(other);
      ADD_FAILURE() << "it was opened as another's";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("is the store of rank 1 of 2"), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(open({1, 2}), 2u) << "nothing was changed";
}

TEST(TileStoreOpen, ALostEndIsMadeAgainBehindWhatBelongsToTheTiles) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  const std::uint64_t end = std::filesystem::file_size(directory.file());
  std::filesystem::resize_file(directory.file(), end - kExtentAlignment);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);
  EXPECT_EQ(std::filesystem::file_size(directory.file()), end);
  std::filesystem::resize_file(directory.file(), end - 2 * kExtentAlignment);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
}

TEST(TileStoreOpen, ALargerScratchAreaHasTheSecondSuperblockBehindIt) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  auto shape = three_tiles();
  shape.least_scratch_bytes = 10 * shape.scratch_bytes;
  TileStore::open(directory.path(), shape);
  directory.damage(30);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);
}

TEST(TileStoreOpen, ASuperblockThatIsDamagedWhileARunGoesOnIsWrittenAnewAtACommit) {
  StoreDirectory directory;
  make_store(directory.path(), 0);
  auto store = TileStore::open(directory.path(), three_tiles());
  const std::uint64_t end = std::filesystem::file_size(directory.file());
  EXPECT_EQ(store->missing(), nullptr);
  for (const std::uint64_t copy : {std::uint64_t{0}, end - kExtentAlignment}) {
    directory.damage(copy + 30);
    EXPECT_NE(with_log([&] { EXPECT_EQ(store->missing(), nullptr); }).find("written anew"), std::string::npos);
  }
  directory.damage(30);
  directory.damage(end - kExtentAlignment + 30);
  EXPECT_NE(with_log([&] { EXPECT_EQ(store->missing(), nullptr); }).find("both of its superblocks"), std::string::npos);
  EXPECT_EQ(with_log([&] { EXPECT_EQ(store->missing(), nullptr); }), "");
  store.reset();
  const std::filesystem::path paths[] = {directory.path()};
  EXPECT_FALSE(StoreFiles::open_read_only(paths).superblock_damaged(0));
}

TEST(TileStoreOpen, OneOfAnotherUserOrThatOthersCanWriteIsNotUsed) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  for (const mode_t mode : {0620, 0602}) {
    ASSERT_EQ(::chmod(directory.file().c_str(), mode), 0);
    EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kInvalidArgument);
    EXPECT_EQ(TileStore::open_to_read(directory.path(), three_tiles())->committed().step, 1u);
  }
  ASSERT_EQ(::chmod(directory.file().c_str(), 0644), 0);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a file away";
  ASSERT_EQ(::chown(directory.file().c_str(), 1234, 1234), 0);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([&] { TileStore::roll_back(directory.path(), three_tiles(), {}); }), Code::kInvalidArgument);
}

TEST(TileStoreOpen, AStateArrayThatIsNotKnownIsRefusedBeforeAnythingIsWritten) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  auto shape = three_tiles();
  shape.identity.description = "three tilez";
  shape.identity.difference = [](const std::string&, const std::string&) -> std::string {
    throw Error(Code::kUnsupported, {"store", "keeps an array that is not known", 0, "use another version"});
  };
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), shape); }), Code::kUnsupported);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
}

TEST(TileStoreOpen, NothingOfTheOlderStepIsOverwrittenBeforeTheLastOneIsSaidToBeVerified) {
  StoreDirectory directory;
  make_store(directory.path(), 0);
  EXPECT_FALSE(TileStore::open(directory.path(), three_tiles())->unverified()) << "there is no older step";
  StoreDirectory other;
  make_store(other.path(), 1);
  auto store = TileStore::open(other.path(), three_tiles());
  EXPECT_TRUE(store->unverified());
  EXPECT_DEATH(store->writable(0), "the newer one is known to be whole");
  store->note_verified();
  EXPECT_NE(store->writable(0).extent[0].offset, store->readable(0).extent[0].offset);
}

// Makes a store one of format 3, whose records are as large here, but count no updates.
void make_format_3(const StoreDirectory& directory) {
  const std::filesystem::path paths[] = {directory.path()};
  const auto [layout, choice, block] = [&] {
    const StoreFiles files = StoreFiles::open_read_only(paths);
    const StoreLayout at = TileStore::read_layout(files, three_tiles());
    return std::tuple(at, TileStore::read_records(files, at), files.superblock());
  }();
  const RecordForm form{.version = 3, .fingerprint = block.fingerprint, .tiles = block.tiles};
  std::fstream file(directory.file(), std::ios::in | std::ios::out | std::ios::binary);
  const auto put = [&file](std::uint64_t offset, std::span<const std::byte> bytes) {
    file.seekp(static_cast<std::streamoff>(offset));
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  };
  for (const Manifest* manifest : {&*choice.manifest, &*choice.older}) {
    std::vector<std::byte> record(record_bytes(form));
    encode_record(*manifest, form, record);
    for (const std::uint64_t copy : layout.record_offset[manifest->sequence % 2]) put(copy, record);
  }
  std::vector<std::byte> old;
  const auto append = [&old](const auto& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    old.insert(old.end(), bytes.begin(), bytes.end());
  };
  append(block.magic), append(std::uint32_t{3}), append(block.slots), append(block.fingerprint), append(block.tiles);
  append(block.description_bytes), append(block.total_bytes), append(block.scratch_bytes);
  append(block.description_checksum), append(block.store_id), append(block.part), append(block.parts);
  append(block.unit_bytes), append(block.shares);
  append(granule_checksum(old));
  old.resize(kExtentAlignment);
  put(0, old);
  file.close();
  std::filesystem::resize_file(directory.file(), block.total_bytes);
}

TEST(TileStoreOpen, OneOfFormat3IsUsedAsItIsButForUpdateCounts) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  make_format_3(directory);
  const auto size = std::filesystem::file_size(directory.file());
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    auto store = TileStore::open(directory.path(), three_tiles());
    EXPECT_EQ(store->committed().step, 2u);
    expect_tiles(*store, three_tiles(), arena, 2);
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 3);
    const std::vector<std::uint64_t> counts(three_tiles().parameters, 3);
    EXPECT_EQ(code_of([&] { store->commit(3, {}, *thread, arena.memory(), counts); }), Code::kUnsupported);
    EXPECT_EQ(store->committed().step, 2u);
    store->commit(3, {}, *thread, arena.memory());
    EXPECT_EQ(store->missing(), nullptr);
  }
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 3u);
  EXPECT_EQ(TileStore::roll_back(directory.path(), three_tiles(), {}), 2u);
  EXPECT_EQ(std::filesystem::file_size(directory.file()), size);
  directory.damage(30);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
}

// The file is a killed run's, which needs a moment to end, as after `kill -9`.
TEST(TileStoreOpen, AFileThatAKilledRunStillHoldsIsWaitedFor) {
  StoreDirectory directory;
  const auto name = StoreFiles::temporary_name(directory.path());
  std::optional<File> held = File::open(name, {.writable = true, .create = true, .direct = false});
  held->lock(0);
  std::thread end([&held] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    held.reset();
  });
  EXPECT_NO_THROW(TileStore::create(directory.path(), three_tiles(), true));
  end.join();
}

// Another one's file is no leftover of anybody, whoever makes it first.
TEST(TileStoreOpen, OfSeveralThatBeginAtOnceNoneIsToldToRemoveAnothersFile) {
  StoreDirectory directory;
  std::vector<std::thread> starts;
  std::atomic<int> made = 0;
  for (int i = 0; i < 4; ++i) {
    starts.emplace_back([&] {
      for (int n = 0; n < 50; ++n) {
        try {
          TileStore::create(directory.path(), three_tiles(), false);
          ++made;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Code::kBusy) << error.what();
        }
      }
    });
  }
  for (std::thread& start : starts) start.join();
  EXPECT_GT(made, 0);
}

}  // namespace
}  // namespace spillway
