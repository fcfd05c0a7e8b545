#include "swap/superblock.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <optional>
#include <span>

#include "spillway/error.h"
#include "spillway/units.h"
#include "swap/extents.h"
#include "swap/manifest.h"

namespace spillway {
namespace {

Superblock some_superblock() {
  Superblock block{};
  block.slots = 2;
  block.fingerprint = 7;
  block.tiles = 3;
  block.parameters = 5;
  block.description_bytes = 100;
  block.total_bytes = 64 * kMiB;
  block.scratch_bytes = kMiB;
  block.part = 1;
  block.parts = 3;
  block.run_id[0] = 11;
  block.ranks = 1;
  block.unit_bytes = kMiB;
  for (std::size_t part = 0; part < 3; ++part) block.shares[part] = static_cast<std::uint8_t>(1 + part);
  seal_superblock(block);
  return block;
}

std::span<const std::byte> bytes_of(const Superblock& block) { return std::as_bytes(std::span(&block, 1)); }

// Nothing: it was accepted.
std::optional<Code> refusal(const Superblock& block) {
  try {
    parse_superblock(bytes_of(block), "a/spillway.store");
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().object, "a/spillway.store");
    return error.code();
  }
  return std::nullopt;
}

TEST(Superblock, ComesBackAsItWasWritten) {
  const Superblock block = some_superblock();
  const Superblock read = parse_superblock(bytes_of(block), "store");
  EXPECT_EQ(std::memcmp(&read, &block, sizeof block), 0);
}

TEST(Superblock, EveryFlippedBitIsNoticed) {
  for (std::size_t bit = 0; bit < sizeof(Superblock) * 8; ++bit) {
    Superblock block = some_superblock();
    auto* const bytes = reinterpret_cast<std::byte*>(&block);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_TRUE(refusal(block).has_value()) << "bit " << bit;
  }
}

TEST(Superblock, AnotherFormatIsSaidToBeOne) {
  for (const std::uint32_t version : {kOldestFormatVersion - 1, kFormatVersion + 1}) {
    Superblock block = some_superblock();
    block.format_version = version;
    EXPECT_EQ(refusal(block), Code::kUnsupported);
  }
}

// Whose checksum is right, but which Spillway did not write: each of these would overflow, abort or be followed to
// bytes that are not there.
TEST(Superblock, NumbersThatDoNotFitTogetherAreRefused) {
  const std::function<void(Superblock&)> changes[] = {
      [](Superblock& b) { b.parts = 0; },
      [](Superblock& b) { b.ranks = 0; },
      [](Superblock& b) { b.rank = 1; },
      [](Superblock& b) { b.parts = kMostStorePaths + 1; },
      [](Superblock& b) { b.part = 3; },
      [](Superblock& b) { b.shares[2] = 0; },
      [](Superblock& b) { b.slots = 3; },
      [](Superblock& b) { b.unit_bytes = 0; },
      [](Superblock& b) { b.unit_bytes = kMiB + 512; },
      [](Superblock& b) { b.unit_bytes = kExtentAlignment << 40; },
      [](Superblock& b) { b.total_bytes = UINT64_MAX; },
      [](Superblock& b) { b.description_bytes = b.total_bytes + 1; },
      [](Superblock& b) { b.scratch_bytes = UINT64_MAX - kExtentAlignment; },
      [](Superblock& b) { b.tiles = 1025; },
      [](Superblock& b) { b.parameters = b.total_bytes / 8 + 1; },
      [](Superblock& b) { b.parameters = std::uint64_t{1} << 61; },
      [](Superblock& b) { b.tiles = std::uint64_t{1} << 61; },  // 24 bytes for each are 0, modulo 2^64
  };
  for (const auto& change : changes) {
    Superblock block = some_superblock();
    change(block);
    seal_superblock(block);
    EXPECT_EQ(refusal(block), Code::kCorrupt) << &change - changes;
  }
  Superblock largest = some_superblock();
  largest.tiles = 1024;
  largest.description_bytes = largest.scratch_bytes = largest.total_bytes;
  seal_superblock(largest);
  EXPECT_EQ(refusal(largest), std::nullopt);
}

}  // namespace
}  // namespace spillway
