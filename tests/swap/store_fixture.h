// A store of a few tiles in a directory of its own, with known bytes in it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/host_memory.h"
#include "spillway/error.h"
#include "swap/tile_store.h"
#include "tests/temp_directory.h"

namespace spillway::testing {

class StoreDirectory {
 public:
  const std::filesystem::path& path() const { return own_.path(); }
  std::filesystem::path file() const { return own_ / kStoreFileName; }

  // Overwrites bytes of the store, also before its first commit, behind everybody's back.
  void damage(std::uint64_t offset, std::size_t bytes = 1) const {
    const bool named = std::filesystem::exists(file());
    std::fstream file(named ? this->file() : StoreFiles::temporary_name(path()),
                      std::ios::in | std::ios::out | std::ios::binary);
    for (std::size_t i = 0; i < bytes; ++i) {
      file.seekg(static_cast<std::streamoff>(offset + i));
      const int old = file.get();
      file.seekp(static_cast<std::streamoff>(offset + i));
      file.put(static_cast<char>(old ^ 0x10));
    }
  }

 private:
  const TempDirectory own_;
};

inline StoreShape three_tiles(std::uint32_t slots = 2) {
  StoreShape shape;
  shape.tiles = {{.count = 200 * 1024, .type = DType::kBFloat16, .trainable = true},
                 {.count = 1024, .type = DType::kBFloat16, .trainable = true},
                 {.count = 3 * 1024, .type = DType::kBFloat16, .trainable = false}};
  shape.parameters = 4;
  shape.slots = slots;
  shape.scratch_bytes = 65536;
  shape.identity = {.description = "three tiles", .fingerprint = 42};
  return shape;
}

inline std::uint64_t checksum_of(std::span<const std::byte> extent) {
  std::vector<std::uint64_t> granules;
  for (std::size_t at = 0; at < extent.size(); at += kGranuleBytes) {
    granules.push_back(granule_checksum(extent.subspan(at, std::min<std::size_t>(kGranuleBytes, extent.size() - at))));
  }
  return extent_checksum(granules);
}

// Writes pattern `seed` into every trainable tile's writable slot (frozen ones too when `all`).
inline void write_tiles(TileStore& store, const StoreShape& shape, StoreThread& thread, HostArena& arena,
                        std::uint64_t seed, bool all = false) {
  store.note_verified();  // it has just been made, or is whole
  IoBatch batch(thread);
  for (std::uint32_t t = 0; t < shape.tiles.size(); ++t) {
    if (!shape.tiles[t].trainable && !all) continue;
    for (Part part : {Part::kWeights, Part::kStates}) {
      const Extent extent = store.writable(t).extent[index_of(part)];
      if (extent.bytes == 0) continue;
      const auto bytes = arena.memory().first(extent.bytes);
      std::mt19937_64 random(seed * 100 + t * 2 + index_of(part));
      for (std::size_t i = 0; i < bytes.size(); i += 8) {
        const std::uint64_t word = random();
        std::memcpy(bytes.data() + i, &word, 8);
      }
      batch.add({.op = IoOp::kWrite,
                 .file = kStripedSpace,
                 .offset = extent.offset,
                 .buffer = bytes.data(),
                 .bytes = extent.bytes});
      batch.wait();
      store.note_written(t, part, checksum_of(bytes));
    }
  }
}

// True when every readable extent matches its checksum and, for trainable tiles, holds pattern `seed`.
inline void expect_tiles(const TileStore& store, const StoreShape& shape, HostArena& arena, std::uint64_t seed) {
  for (std::uint32_t t = 0; t < shape.tiles.size(); ++t) {
    const TileStore::Slot slot = store.readable(t);
    for (Part part : {Part::kWeights, Part::kStates}) {
      const Extent extent = slot.extent[index_of(part)];
      if (extent.bytes == 0) continue;
      const auto bytes = arena.memory().first(extent.bytes);
      store.files().read_at(extent.offset, bytes);
      EXPECT_EQ(checksum_of(bytes), slot.checksum[index_of(part)]) << "tile " << t;
      if (!shape.tiles[t].trainable) continue;
      std::mt19937_64 random(seed * 100 + t * 2 + index_of(part));
      const std::uint64_t word = random();
      EXPECT_EQ(std::memcmp(bytes.data(), &word, 8), 0) << "tile " << t << " holds another pattern than " << seed;
    }
  }
}

inline std::unique_ptr<StoreThread> thread_for(TileStore& store, HostArena& arena) {
  IoQueueOptions options;
  options.stripes = &store.files().stripes();
  return std::make_unique<StoreThread>(options, store.files().pointers(),
                                       std::vector<std::span<std::byte>>{arena.memory()});
}

inline constexpr std::uint64_t kArenaBytes = 4 << 20;

template <typename Work>
Code code_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(": "), std::string::npos);
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return Code::kUnsupported;
}

// Makes a store whose last commit is step `commits`, pattern `commits`.
inline void make_store(const std::filesystem::path& directory, std::uint64_t commits,
                       const StoreShape& shape = three_tiles()) {
  HostArena arena(kArenaBytes, kPinnedArena);
  auto store = TileStore::create(directory, shape, false);
  auto thread = thread_for(*store, arena);
  for (std::uint64_t step = 0; step <= commits; ++step) {
    write_tiles(*store, shape, *thread, arena, step, step == 0);
    store->commit(step, std::as_bytes(std::span(&step, 1)), *thread, arena.memory());
    store->note_all_committed();
  }
}

}  // namespace spillway::testing
