#include "swap/extents.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace spillway {
namespace {

std::vector<TileShape> shapes() {
  return {{.count = 4096, .type = DType::kBFloat16, .trainable = true},
          {.count = 1024, .type = DType::kBFloat16, .trainable = true},
          {.count = 2048, .type = DType::kFloat32, .trainable = true},
          {.count = 5120, .type = DType::kBFloat16, .trainable = false}};
}

TEST(Extents, PayloadIsTwoPlusTenBytesInBf16AndFourPlusEightInFp32) {
  EXPECT_EQ(payload_bytes(shapes()[0], Part::kWeights), 4096u * 2);
  EXPECT_EQ(payload_bytes(shapes()[0], Part::kStates), 4096u * 10);
  EXPECT_EQ(payload_bytes(shapes()[2], Part::kWeights), 2048u * 4);
  EXPECT_EQ(payload_bytes(shapes()[2], Part::kStates), 2048u * 8);
  EXPECT_EQ(payload_bytes(shapes()[3], Part::kStates), 0u);
}

TEST(Extents, StatesAreTheMomentsOfTheOptimizerAndTheMaster) {
  for (const OptimizerKind kind : kOptimizerKinds) {
    const std::uint64_t moments = kind == OptimizerKind::kAdam ? 8 : 4;
    for (const auto& [type, master] :
         {std::pair(DType::kFloat32, 0u), std::pair(DType::kBFloat16, 2u), std::pair(DType::kFloat16, 4u)}) {
      const TileShape shape{.count = 1024, .type = type, .optimizer = kind};
      EXPECT_EQ(payload_bytes(shape, Part::kStates), 1024u * (moments + master));
      const StateArrays arrays = state_arrays(shape);
      std::uint64_t end = 0;
      for (const StateArray& array : arrays) {
        EXPECT_EQ(array.offset, end) << array.name;
        end += 1024 * array.bytes;
        if (array.name == kMaster || array.name == kResidual) {
          EXPECT_EQ(array.offset, 1024u * moments);
          EXPECT_EQ(array.bytes, master);
        }
      }
      EXPECT_EQ(arrays.count, moments / 4 + (master > 0 ? 1 : 0));
      EXPECT_EQ(state_arrays({.count = 1024, .type = type, .trainable = false, .optimizer = kind}).count, 0u);
    }
  }
}

TEST(Extents, ScalesLieBehindAllArraysAndCount) {
  constexpr StateArray kInt8[] = {{.name = kExpAvg, .type = "int8", .bytes = 1, .group = 32, .scale = "bf16"},
                                  {.name = kExpAvgSq, .type = "uint8", .bytes = 1, .group = 32, .scale = "bf16"},
                                  {.name = kResidual, .type = "int16", .bytes = 2}};
  const TileShape shape{.count = 4096, .type = DType::kBFloat16, .states = kInt8};
  EXPECT_EQ(payload_bytes(shape, Part::kWeights), 4096u * 2);
  EXPECT_EQ(payload_bytes(shape, Part::kStates), 4096u * 4 + 2 * 128 * 2);
  EXPECT_EQ(extent_bytes(shape, Part::kStates), kExtentAlignment);
  const StateArrays arrays = state_arrays(shape);
  ASSERT_EQ(arrays.count, 3u);
  EXPECT_EQ(arrays.array[1].offset, 4096u);
  EXPECT_EQ(arrays.array[2].offset, 4096u * 2);
  EXPECT_EQ(arrays.array[0].scales, 4096u * 4);
  EXPECT_EQ(arrays.array[1].scales, 4096u * 4 + 256);
  EXPECT_EQ(element_bytes(shape, Part::kStates), (ElementBytes{1, 1, 2, 0}));
}

// With two slots nothing overlaps; with one slot, both slots of a tile are the same place.
TEST(Extents, PartsOfTheFileNeverOverlap) {
  for (std::uint32_t slots : {1u, 2u}) {
    const StoreLayout layout = lay_out_store(
        shapes(), {.description_bytes = 100, .record_bytes = 65536, .scratch_bytes = 131072, .slots = slots});
    std::vector<Extent> parts = {
        {0, kExtentAlignment}, {layout.description_offset, 65536}, {layout.scratch_offset, 131072}};
    for (const auto& record : layout.record_offset) {
      for (std::uint64_t copy : record) parts.push_back({copy, 65536});
    }
    for (std::size_t t = 0; t < layout.tiles.size(); ++t) {
      for (int slot = 0; slot < 2; ++slot) {
        for (const Extent& extent : layout.tiles[t].extent[slot]) {
          if (slot == 1 && (slots == 1 || !shapes()[t].trainable)) {
            EXPECT_EQ(extent.offset, layout.tiles[t].extent[0][&extent - layout.tiles[t].extent[slot]].offset);
          } else if (extent.bytes > 0) {
            parts.push_back(extent);
          }
        }
      }
    }
    std::ranges::sort(parts, {}, &Extent::offset);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].offset % kExtentAlignment, 0u);
      const std::uint64_t end = i + 1 < parts.size() ? parts[i + 1].offset : layout.total_bytes;
      EXPECT_EQ(parts[i].offset + parts[i].bytes, end) << "gap or overlap after part " << i << ", slots " << slots;
    }
  }
}

}  // namespace
}  // namespace spillway
