#include "swap/superblock.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "swap/extents.h"
#include "swap/manifest.h"

namespace spillway {
namespace {

constexpr std::uint64_t kStoreMagic = 0x3145524f54535053;  // "SPSTORE1"

// Far beyond any drive, and small enough that offsets in a file of the store do not overflow.
constexpr std::uint64_t kMostSpaceBytes = std::uint64_t{1} << 60;
constexpr std::uint64_t kMostUnitBytes = kGiB;

struct SuperblockOfFormat3 {
  std::uint64_t magic;
  std::uint32_t format_version;
  std::uint32_t slots;
  std::uint64_t fingerprint;
  std::uint64_t tiles;
  std::uint64_t description_bytes;
  std::uint64_t total_bytes;
  std::uint64_t scratch_bytes;
  std::uint64_t description_checksum;
  std::uint64_t store_id[2];
  std::uint32_t part, parts;
  std::uint64_t unit_bytes;
  std::uint8_t shares[kMostStorePaths];
  std::uint64_t checksum;
};

template <class Block>
std::uint64_t checksum_of(const Block& block) {
  return granule_checksum({reinterpret_cast<const std::byte*>(&block), offsetof(Block, checksum)});
}

template <class Block>
Block load_block(std::span<const std::byte> bytes) {
  Block block;
  std::memcpy(&block, bytes.data(), sizeof block);
  return block;
}

Superblock from_format_3(const SuperblockOfFormat3& old) {
  Superblock block{};
  block.magic = old.magic;
  block.format_version = old.format_version;
  block.slots = old.slots;
  block.fingerprint = old.fingerprint;
  block.tiles = old.tiles;
  block.description_bytes = old.description_bytes;
  block.total_bytes = old.total_bytes;
  block.scratch_bytes = old.scratch_bytes;
  block.description_checksum = old.description_checksum;
  std::memcpy(block.store_id, old.store_id, sizeof block.store_id);
  block.part = old.part;
  block.parts = old.parts;
  block.ranks = 1;
  block.unit_bytes = old.unit_bytes;
  std::memcpy(block.shares, old.shares, sizeof block.shares);
  return block;
}

// The checksum tells damage from what was written; this tells what Spillway wrote from what somebody else did.
bool is_possible(const Superblock& block) {
  const bool parts = block.parts >= 1 && block.parts <= kMostStorePaths && block.part < block.parts &&
                     std::all_of(block.shares, block.shares + block.parts, [](std::uint8_t s) { return s > 0; });
  // Runs of the space are read with direct I/O, so a unit must be aligned as extents are.
  const bool unit =
      block.unit_bytes > 0 && block.unit_bytes <= kMostUnitBytes && block.unit_bytes % kExtentAlignment == 0;
  // A tile takes one extent at least.
  const bool space = block.total_bytes <= kMostSpaceBytes && block.description_bytes <= block.total_bytes &&
                     block.scratch_bytes <= block.total_bytes && block.tiles <= block.total_bytes / kExtentAlignment &&
                     block.parameters <= block.total_bytes / sizeof(std::uint64_t);
  return parts && unit && space && block.slots <= 2 && block.rank < block.ranks;
}

}  // namespace

void seal_superblock(Superblock& block) {
  block.magic = kStoreMagic;
  block.format_version = kFormatVersion;
  block.checksum = checksum_of(block);
}

Superblock parse_superblock(std::span<const std::byte> bytes, const std::string& object) {
  SPILLWAY_CHECK(bytes.size() >= sizeof(Superblock), "a superblock is parsed whole");
  auto block = load_block<Superblock>(bytes);
  if (block.magic != kStoreMagic) {
    throw Error(Code::kCorrupt, object, "not a Spillway store, or its creation was cut short", 0,
                Remedy::kOtherPathOrReplace);
  }
  // Before the checksum, which another format may compute over other bytes.
  if (block.format_version < kOldestFormatVersion || block.format_version > kFormatVersion) {
    throw Error(Code::kUnsupported, object,
                fmt::format("written by {} version (store format {}, this one reads {} to {})",
                            block.format_version > kFormatVersion ? "a newer" : "an older", block.format_version,
                            kOldestFormatVersion, kFormatVersion),
                0, Remedy::kThatVersionOrReplace);
  }
  // Format 3 has a shorter block, with its checksum elsewhere.
  bool whole = false;
  if (block.format_version < kTwoSuperblocksFormat) {
    const auto old = load_block<SuperblockOfFormat3>(bytes);
    whole = old.checksum == checksum_of(old);
    block = from_format_3(old);
  } else {
    whole = block.checksum == checksum_of(block);
  }
  if (!whole || !is_possible(block)) {
    throw Error(Code::kCorrupt, object, "the superblock is damaged", 0, Remedy::kReplace);
  }
  return block;
}

}  // namespace spillway
