#include "swap/tile_store.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "spillway/log.h"
#include "tests/swap/store_fixture.h"

namespace spillway {
namespace {

using namespace testing;

StoreLayout three_tiles_layout() {
  return lay_out_store(three_tiles().tiles,
                       {.description_bytes = 65536, .record_bytes = 65536, .scratch_bytes = 65536});
}

TEST(TileStore, ReopensAtItsLastCommit) {
  StoreDirectory directory;
  make_store(directory.path(), 3);
  HostArena arena(kArenaBytes, kPinnedArena);
  const auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().step, 3u);
  EXPECT_EQ(store->committed().blob.size(), 8u);
  expect_tiles(*store, three_tiles(), arena, 3);
}

TEST(TileStore, UpdateCountsAreKeptWithTheStepThatTheyAreOf) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  const std::vector<std::uint64_t> second = {2, 0, 1, 2}, third = {3, 0, 1, 3};
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    auto store = TileStore::open(directory.path(), three_tiles());
    EXPECT_TRUE(store->committed().update_counts.empty());
    auto thread = thread_for(*store, arena);
    std::uint64_t step = 2;
    for (const auto& counts : {second, third}) {
      write_tiles(*store, three_tiles(), *thread, arena, step);
      store->commit(step++, {}, *thread, arena.memory(), counts);
      EXPECT_EQ(store->committed().update_counts, counts);
    }
  }
  EXPECT_EQ(TileStore::open_to_read(directory.path(), three_tiles())->committed().update_counts, third);
  EXPECT_EQ(TileStore::roll_back(directory.path(), three_tiles(), {}), 2u);
  auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().update_counts, second);
  auto thread = thread_for(*store, arena);
  store->commit(2, {}, *thread, arena.memory());
  EXPECT_TRUE(store->committed().update_counts.empty());
}

TEST(TileStore, AStoreOfAnotherNumberOfParametersIsOfAnotherModel) {
  StoreDirectory directory;
  make_store(directory.path(), 0);
  auto shape = three_tiles();
  ++shape.parameters;
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), shape); }), Code::kInvalidArgument);
}

TEST(TileStore, WhatWasNotCommittedIsForgottenAndTheCommittedSlotsAreUntouched) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    auto store = TileStore::open(directory.path(), three_tiles());
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 99);
    expect_tiles(*store, three_tiles(), arena, 99);  // readable before the commit
  }
  const auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().step, 2u);
  expect_tiles(*store, three_tiles(), arena, 2);
}

TEST(TileStore, NothingIsCommittedOnceAWriteWasLost) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    auto store = TileStore::open(directory.path(), three_tiles());
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 99);
    store->note_lost();
    EXPECT_EQ(code_of([&] { store->commit(3, {}, *thread, arena.memory()); }), Code::kIo);
  }
  const auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().step, 2u);
  expect_tiles(*store, three_tiles(), arena, 2);
}

TEST(TileStore, FilesAreForTheirOwnerOnly) {
  StoreDirectory directory;
  make_store(directory.path(), 0);
  struct stat info;
  ASSERT_EQ(::stat(directory.file().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(TileStore, AnExistingStoreIsRefusedUnlessItMayBeReplaced) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  EXPECT_EQ(code_of([&] { TileStore::create(directory.path(), three_tiles(), false); }), Code::kExists);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
}

TEST(TileStore, AnExistingStoreIsReplacedByTheFirstCommitAndNotBefore) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  TileStore::create(directory.path(), three_tiles(), true);  // its run ends during import
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
  std::filesystem::copy_file(directory.file(), directory.path() / "spillway.store.new");  // or is killed there
  EXPECT_EQ(TileStore::file_bytes(directory.path()), 2 * std::filesystem::file_size(directory.file()));
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
  EXPECT_FALSE(std::filesystem::exists(directory.path() / "spillway.store.new"));
  {
    HostArena arena(kArenaBytes, kPinnedArena);
    auto store = TileStore::create(directory.path(), three_tiles(), true);
    EXPECT_EQ(code_of([&] { TileStore::open_to_read(directory.path(), three_tiles()); }), Code::kBusy);
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 0, true);
    store->commit(0, {}, *thread, arena.memory());
  }
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 0u);
}

TEST(TileStore, AStoreThatNeverCommittedIsNotThere) {
  StoreDirectory directory;
  TileStore::create(directory.path(), three_tiles(), false);  // its run ends during import
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  std::ofstream(directory.path() / "spillway.store.new") << "what a killed one leaves";
  make_store(directory.path(), 1);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
}

TEST(TileStore, AStoreWithoutARecordIsRefusedAndNotReplacedUnasked) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  for (const auto& record : three_tiles_layout().record_offset) {
    for (std::uint64_t copy : record) directory.damage(copy + 40);
  }
  EXPECT_EQ(code_of([&] { TileStore::create(directory.path(), three_tiles(), false); }), Code::kExists);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
}

TEST(TileStore, AStoreThatNoDiskHasRoomForReplacesNone) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  auto huge = three_tiles();
  huge.scratch_bytes = std::uint64_t{1} << 50;  // more than any disk has
  bool asked = false;
  EXPECT_EQ(code_of([&] { TileStore::create(directory.path(), huge, true, [&] { asked = true; }); }), Code::kIo);
  EXPECT_FALSE(asked);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
}

TEST(TileStore, AFileThatIsNoStoreIsNeverReplacedUnasked) {
  StoreDirectory directory;
  std::ofstream(directory.file()) << std::string(200000, 'x');
  EXPECT_EQ(code_of([&] { TileStore::create(directory.path(), three_tiles(), false); }), Code::kExists);
  EXPECT_EQ(std::filesystem::file_size(directory.file()), 200000u);
}

TEST(TileStore, AStoreOfAnotherModelOrWithOneSlotIsRefused) {
  StoreDirectory directory, other;
  make_store(directory.path(), 1);
  auto shape = three_tiles();
  shape.identity.fingerprint = 43;
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), shape); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([&] { TileStore::open(other.path(), three_tiles()); }), Code::kNotFound);
  {
    HostArena arena(kArenaBytes, kPinnedArena);
    auto store = TileStore::create(other.path(), three_tiles(1), false);
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(1), *thread, arena, 0, true);
    store->commit(0, {}, *thread, arena.memory());
  }
  EXPECT_EQ(code_of([&] { TileStore::open(other.path(), three_tiles()); }), Code::kUnsupported);
}

TEST(TileStore, ADamagedNewestRecordFallsBackToTheOlderStep) {
  StoreDirectory directory;
  make_store(directory.path(), 2);  // sequences 1, 2, 3: step 2 is record 1, step 1 is record 0
  const StoreLayout layout = three_tiles_layout();
  directory.damage(layout.record_offset[1][0] + 40);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);  // its copy is whole
  directory.damage(layout.record_offset[1][1] + 40);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
}

TEST(TileStore, TheOlderStepIsVerifiedBeforeItIsUsed) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  const StoreLayout layout = three_tiles_layout();
  for (std::uint64_t copy : layout.record_offset[1]) directory.damage(copy + 40);
  // Step 1 (sequence 2): written at sequence 1 into slot 1, at sequence 2 into slot 0.
  directory.damage(layout.tiles[0].extent[0][1].offset + 300000);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
}

// What goes to the log while `work` is done.
template <typename Work>
std::string logged(Work&& work) {
  std::string said;
  set_log_sink([&said](LogLevel, std::string_view message) { said += std::string(message) + "\n"; });
  work();
  set_log_sink([](LogLevel, std::string_view message) { std::fprintf(stderr, "%s\n", std::string(message).c_str()); });
  return said;
}

TEST(TileStore, EveryFallbackSaysSo) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  const StoreLayout layout = three_tiles_layout();
  const auto open = [&] { TileStore::open(directory.path(), three_tiles()); };
  EXPECT_EQ(logged(open), "");
  directory.damage(layout.record_offset[1][0] + 40);
  EXPECT_EQ(logged(open), directory.file().string() +
                              ": one of the two copies of a manifest record is damaged; going "
                              "on from step 2, whose record is whole\n");
  directory.damage(layout.record_offset[1][1] + 40);
  EXPECT_EQ(logged(open), directory.file().string() +
                              ": the newest manifest record is damaged, and so is its copy; "
                              "going back to step 1 and checking every byte of it\n");
}

TEST(TileStore, TheStepThatCanBeGoneBackToIsNamed) {
  StoreDirectory directory;
  make_store(directory.path(), 2);  // step 2 lies in slot 1, step 1 in slot 0
  const auto store = TileStore::open(directory.path(), three_tiles());
  const auto says = [&](const Extent& extent, const std::string& what) {
    for (std::uint64_t at : {extent.offset, extent.offset + extent.bytes - 1}) {
      EXPECT_NE(store->way_back(at).text.find(what), std::string::npos)
          << store->way_back(at).text << "\nnot: " << what;
    }
  };
  const auto& tiles = store->layout().tiles;
  const std::string rollback = "spillway store " + directory.path().string() + " --rollback goes back to step 1 ";
  const Extent scratch{store->layout().scratch_offset, kExtentAlignment};
  for (int tile : {0, 1}) {
    for (const Extent& extent : tiles[tile].extent[1]) says(extent, rollback);
    for (const Extent& extent : tiles[tile].extent[0]) says(extent, "step 2, the last committed one, is not affected");
  }
  says(scratch, "step 2, the last committed one, is not affected: on_existing resume");
  says(tiles[2].extent[0][0], "part of step 2, the last committed one, and no other is left");  // frozen
  HostArena arena(kArenaBytes, kPinnedArena);
  auto thread = thread_for(*store, arena);
  write_tiles(*store, three_tiles(), *thread, arena, 3);
  says(tiles[0].extent[1][1], "part of step 2, the last committed one, and no other is left");
  says(tiles[0].extent[0][1], "step 2, the last committed one, is not affected");
  store->commit(3, {}, *thread, arena.memory());
  says(tiles[0].extent[0][1], "--rollback goes back to step 2 ");
  says(tiles[0].extent[1][1], "step 3, the last committed one, is not affected");
}

TEST(TileStore, RollingBackIsGoingOnFromTheOlderStep) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  std::uint64_t read = 0;
  EXPECT_EQ(TileStore::roll_back(directory.path(), three_tiles(), [&](auto done, auto) { read = done; }), 1u);
  EXPECT_GT(read, 2000u * 1024);
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    const auto store = TileStore::open(directory.path(), three_tiles());
    EXPECT_EQ(store->committed().step, 1u);
    EXPECT_EQ(store->committed().blob.size(), 8u);
    expect_tiles(*store, three_tiles(), arena, 1);
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 77);
    store->commit(2, {}, *thread, arena.memory());
  }
  const auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().step, 2u);
  expect_tiles(*store, three_tiles(), arena, 77);
}

TEST(TileStore, RollingBackOutlivesATornCopyAndIsUndoneByTwo) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  const StoreLayout layout = three_tiles_layout();
  TileStore::roll_back(directory.path(), three_tiles(), {});
  directory.damage(layout.record_offset[0][0] + 40);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
  directory.damage(layout.record_offset[0][1] + 40);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 2u);
}

TEST(TileStore, AnOverwrittenStepIsNotRolledBackTo) {
  StoreDirectory directory;
  make_store(directory.path(), 2);
  HostArena arena(kArenaBytes, kPinnedArena);
  {
    auto store = TileStore::open(directory.path(), three_tiles());
    auto thread = thread_for(*store, arena);
    write_tiles(*store, three_tiles(), *thread, arena, 99);
  }
  EXPECT_EQ(code_of([&] { TileStore::roll_back(directory.path(), three_tiles(), {}); }), Code::kCorrupt);
  const auto store = TileStore::open(directory.path(), three_tiles());
  EXPECT_EQ(store->committed().step, 2u);
  expect_tiles(*store, three_tiles(), arena, 2);
}

TEST(TileStore, WithoutAnOlderStepThereIsNoRollingBack) {
  StoreDirectory directory;
  make_store(directory.path(), 0);
  EXPECT_EQ(code_of([&] { TileStore::roll_back(directory.path(), three_tiles(), {}); }), Code::kCorrupt);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 0u);
}

// Two runs make a store in the same place. The one that is slower, because it waits for the old store of its second
// path, must not put its own over what the other has by then.
TEST(TileStore, AStoreThatCameMeanwhileIsNotReplaced) {
  StoreDirectory first, second;
  std::optional<File> held = [&] {
    make_store(second.path(), 1);
    return open_locked(second.file(), {.writable = true, .direct = false}, 10);
  }();
  std::optional<Code> refused;
  std::thread slower([&] {
    const StorePaths paths(std::vector{first.path(), second.path()});
    refused = code_of([&] { TileStore::create(paths, three_tiles(), true); });
  });
  // Most often it waits by now. If it does not, it finds the other's store in use, which ends no better.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto store = TileStore::create(first.path(), three_tiles(), false);
  held.reset();
  slower.join();
  EXPECT_TRUE(refused == Code::kExists || refused == Code::kBusy);
  EXPECT_TRUE(store->files().files().front().at_its_path());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(first.path()), {}), 1);
}

TEST(TileStore, ADamagedDescriptionIsRefusedToWhoNeedsIt) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  const std::vector<std::filesystem::path> paths = {directory.path()};
  EXPECT_EQ(TileStore::read_description(StoreFiles::open_read_only(paths)), "three tiles");
  directory.damage(kExtentAlignment + 3);
  EXPECT_EQ(code_of([&] { TileStore::read_description(StoreFiles::open_read_only(paths)); }), Code::kCorrupt);
}

TEST(TileStore, ATruncatedFileIsRefused) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  std::filesystem::resize_file(directory.file(), std::filesystem::file_size(directory.file()) - 2 * kExtentAlignment);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
  std::filesystem::resize_file(directory.file(), 100);
  EXPECT_EQ(code_of([&] { TileStore::open(directory.path(), three_tiles()); }), Code::kCorrupt);
}

TEST(TileStore, ScratchGrowsForARunThatNeedsMoreAndNothingElseMoves) {
  StoreDirectory directory;
  make_store(directory.path(), 7);
  HostArena arena(kArenaBytes, kPinnedArena);
  StoreShape shape = three_tiles();
  const auto file = directory.path() / kStoreFileName;
  const auto size = std::filesystem::file_size(file);
  shape.least_scratch_bytes = 5 * kExtentAlignment;
  for (int i = 0; i < 2; ++i) {
    auto store = TileStore::open(directory.path(), shape);
    EXPECT_EQ(store->layout().total_bytes, store->layout().scratch_offset + shape.least_scratch_bytes);
    EXPECT_EQ(std::filesystem::file_size(file), size + 4 * kExtentAlignment);
    EXPECT_EQ(store->committed().step, 7u);
    expect_tiles(*store, shape, arena, 7);
  }
  shape.least_scratch_bytes = 0;
  expect_tiles(*TileStore::open(directory.path(), shape), shape, arena, 7);
  shape.least_scratch_bytes = std::uint64_t{1} << 60;
  EXPECT_THROW(TileStore::open(directory.path(), shape), Error);
  shape.least_scratch_bytes = 0;
  expect_tiles(*TileStore::open(directory.path(), shape), shape, arena, 7);
}

TEST(TileStore, OneProcessAtATime) {
  StoreDirectory directory;
  make_store(directory.path(), 1);
  int ready[2], done[2];
  ASSERT_EQ(::pipe(ready) + ::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    File file = File::open(directory.file(), {.writable = true, .direct = false});
    file.lock(10);  // a ring lets go of its files a moment after it is closed
    char byte = 1;
    if (::write(ready[1], &byte, 1) != 1 || ::read(done[0], &byte, 1) != 1) ::_exit(1);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  // Patience is what opening has after a kill -9; a short look says the same here.
  File file = File::open(directory.file(), {.writable = true, .direct = false});
  EXPECT_EQ(code_of([&] { file.lock(0.1); }), Code::kBusy);
  ASSERT_EQ(::write(done[1], &byte, 1), 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(TileStore::open(directory.path(), three_tiles())->committed().step, 1u);
  for (int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

TEST(TileStore, AFailedCreationLeavesNothingBehind) {
  StoreDirectory directory;
  auto shape = three_tiles();
  shape.scratch_bytes = std::uint64_t{1} << 60;  // no file system has it
  EXPECT_EQ(code_of([&] { TileStore::create(directory.path(), shape, false); }), Code::kIo);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace
}  // namespace spillway
