#include "swap/store_check.h"

#include <sys/stat.h>

#include <set>

#include "tests/swap/store_fixture.h"

namespace spillway::testing {
namespace {

// A store in two paths whose tile 0 is larger than a chunk, committed at steps 0 to 2.
class StoreCheck : public ::testing::Test {
 protected:
  StoreCheck() {
    shape_.tiles[0].count = 512 * 1024;
    StorePaths paths(paths_);
    paths.shares = {2, 1};
    HostArena arena(16 << 20, kPinnedArena);
    auto store = TileStore::create(paths, shape_, false);
    auto thread = thread_for(*store, arena);
    for (std::uint64_t step = 0; step <= 2; ++step) {
      write_tiles(*store, shape_, *thread, arena, step, step == 0);
      store->commit(step, {}, *thread, arena.memory());
    }
  }

  struct Found {
    std::vector<BadBytes> bad;
    std::vector<std::pair<std::string, std::uint64_t>> places;
    std::uint64_t bytes = 0, last_done = 0, last_total = 0;
  };
  Found check() {
    StoreFiles files = StoreFiles::open_read_only(paths_);
    EXPECT_FALSE(files.in_use());
    const StoreLayout layout = TileStore::read_layout(files, shape_);
    const ManifestChoice choice = TileStore::read_records(files, layout);
    Found found;
    found.bytes = check_extents(files, layout, *choice.manifest,
                                {.bad =
                                     [&](const BadBytes& bad) {
                                       found.bad.push_back(bad);
                                       found.places.emplace_back(bad.place.file->path(), bad.place.offset);
                                     },
                                 .progress =
                                     [&](std::uint64_t done, std::uint64_t total) {
                                       EXPECT_GE(done, found.last_done);
                                       found.last_done = done;
                                       found.last_total = total;
                                     }});
    return found;
  }

  // The committed extents that are not empty, and where in the files each byte of one lies.
  struct Committed {
    std::uint32_t tile;
    Part part;
    Extent extent;
  };
  std::vector<Committed> committed() const {
    const auto store = TileStore::open(paths_, shape_);
    std::vector<Committed> all;
    for (std::uint32_t t = 0; t < shape_.tiles.size(); ++t) {
      for (Part part : {Part::kWeights, Part::kStates}) {
        const Extent extent = store->committed(t).extent[index_of(part)];
        if (extent.bytes > 0) all.push_back({t, part, extent});
      }
    }
    return all;
  }
  std::pair<std::size_t, std::uint64_t> place(std::uint64_t offset) const {
    const StoreFiles files = StoreFiles::open_read_only(paths_);
    const StoreFiles::FileOffset at = files.place_of(offset);
    return {static_cast<std::size_t>(at.file - files.files().data()), at.offset};
  }

  StoreDirectory directories_[2];
  std::vector<std::filesystem::path> paths_{directories_[0].path(), directories_[1].path()};
  StoreShape shape_ = three_tiles();
};

TEST_F(StoreCheck, AWholeStoreIsReadToTheLastByte) {
  const Found found = check();
  EXPECT_TRUE(found.bad.empty());
  std::uint64_t bytes = 0;
  for (const Committed& one : committed()) bytes += one.extent.bytes;
  EXPECT_EQ(found.bytes, bytes);
  EXPECT_EQ(found.last_done, bytes);
  EXPECT_EQ(found.last_total, bytes);
}

TEST_F(StoreCheck, EveryDamagedExtentIsFoundWithItsPlace) {
  for (const Committed& one : committed()) {
    // First, last and some byte in the middle, whichever file it lies in.
    for (std::uint64_t at : {std::uint64_t{0}, one.extent.bytes / 2 + 7, one.extent.bytes - 1}) {
      const auto [file, offset] = place(one.extent.offset + at);
      directories_[file].damage(offset);
      const Found found = check();
      ASSERT_EQ(found.bad.size(), 1u) << "tile " << one.tile << " byte " << at;
      EXPECT_EQ(found.bad[0].tile, one.tile);
      EXPECT_EQ(found.bad[0].part, one.part);
      EXPECT_EQ(found.bad[0].error, 0);
      const auto [start_file, start] = place(one.extent.offset);
      EXPECT_EQ(found.places[0].first, directories_[start_file].file().string());
      EXPECT_EQ(found.places[0].second, start);
      directories_[file].damage(offset);
    }
  }
  EXPECT_TRUE(check().bad.empty());
}

TEST_F(StoreCheck, SlotsThatAreNotCommittedDoNotMatter) {
  std::vector<std::uint64_t> others;
  {
    const auto store = TileStore::open(paths_, shape_);
    store->note_verified();
    for (std::uint32_t t = 0; t < 2; ++t) {
      for (const Extent& extent : store->writable(t).extent) others.push_back(extent.offset);
    }
  }
  for (std::uint64_t at : others) {
    const auto [file, offset] = place(at);
    directories_[file].damage(offset);
  }
  EXPECT_TRUE(check().bad.empty());
}

TEST_F(StoreCheck, AReadThatFailsIsABadExtentAndTheOthersAreCheckedAllTheSame) {
  StoreFiles files = StoreFiles::open_read_only(paths_);
  const StoreLayout layout = TileStore::read_layout(files, shape_);
  const ManifestChoice choice = TileStore::read_records(files, layout);
  // The files end in the middle of tile 0 while they are open.
  const std::uint64_t keep = files.place_of(layout.tiles[0].extent[0][0].offset).offset + 64 * 1024;
  for (const auto& directory : directories_) std::filesystem::resize_file(directory.file(), keep);
  std::set<std::pair<std::uint32_t, Part>> bad;
  check_extents(files, layout, *choice.manifest, {.bad = [&](const BadBytes& one) {
                  EXPECT_EQ(one.error, ENODATA);
                  EXPECT_TRUE(bad.emplace(one.tile, one.part).second) << "told twice";
                }});
  std::size_t extents = 0;
  for (std::size_t t = 0; t < layout.tiles.size(); ++t) {
    for (const Extent& extent : layout.tiles[t].extent[choice.manifest->tiles[t].slot]) extents += extent.bytes > 0;
  }
  EXPECT_EQ(bad.size(), extents);
}

TEST_F(StoreCheck, TheMessageNamesWhatAndWhere) {
  const auto [file, offset] = place(committed()[1].extent.offset);
  directories_[file].damage(offset);
  StoreFiles files = StoreFiles::open_read_only(paths_);
  const StoreLayout layout = TileStore::read_layout(files, shape_);
  const ManifestChoice choice = TileStore::read_records(files, layout);
  std::string said;
  check_extents(files, layout, *choice.manifest, {.bad = [&](const BadBytes& bad) {
                  const Error error = bad_bytes_error(
                      bad, [](std::uint32_t t) { return "the tile called " + std::to_string(t); }, "do this");
                  EXPECT_EQ(error.code(), Code::kCorrupt);
                  said = error.what();
                }});
  EXPECT_EQ(said, directories_[file].file().string() + ": states of the tile called 0 at offset " +
                      std::to_string(offset) + " do not match their checksum; do this");
}

TEST_F(StoreCheck, LookingChangesNothingAndIsPossibleWhileARunHasIt) {
  struct stat before, after;
  ASSERT_EQ(::stat(directories_[0].file().c_str(), &before), 0);
  check();
  ASSERT_EQ(::stat(directories_[0].file().c_str(), &after), 0);
  EXPECT_EQ(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec);
  EXPECT_EQ(before.st_mtim.tv_sec, after.st_mtim.tv_sec);
  EXPECT_EQ(before.st_size, after.st_size);
  {
    const StoreFiles one = StoreFiles::open_read_only(paths_), two = StoreFiles::open_read_only(paths_);
    EXPECT_FALSE(two.in_use());
    EXPECT_THROW(StoreFiles::open(paths_, 0), Error);  // nobody trains in what is being read
  }
  const auto store = TileStore::open(paths_, shape_);
  EXPECT_TRUE(StoreFiles::open_read_only(paths_).in_use());
}

}  // namespace
}  // namespace spillway::testing
