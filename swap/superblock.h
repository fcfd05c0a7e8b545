// The first and the last bytes of every file of a store: which part of which store it is, and how the space between
// them is divided. Either copy suffices. Pure: bytes in, bytes out; read and written by store_superblocks.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace spillway {

inline constexpr std::uint32_t kMostStorePaths = 16;

// Superblock::slots of a store of named tensors (tensors/tensor_files.h), which has no tiles.
inline constexpr std::uint32_t kSlotsOfTensors = 0;

struct Superblock {
  std::uint64_t magic;
  std::uint32_t format_version;
  std::uint32_t slots;
  std::uint64_t fingerprint;
  std::uint64_t tiles;
  std::uint64_t parameters;         // of the model; a commit record has room for a number of each
  std::uint64_t description_bytes;  // used
  std::uint64_t total_bytes;        // where the space ends
  std::uint64_t scratch_bytes;
  std::uint64_t description_checksum;
  std::uint64_t store_id[2];  // random; the same in all files of a store
  std::uint64_t run_id[2];    // random; the same in the stores of all ranks that train one model
  std::uint32_t part, parts;
  std::uint32_t rank, ranks;
  std::uint64_t unit_bytes;
  std::uint8_t shares[kMostStorePaths];
  std::uint64_t checksum;  // of the bytes before this field
};

// Before format 4: no second copy, no parameters, one rank and no name of the run.
inline constexpr std::uint32_t kTwoSuperblocksFormat = 4;

// Fills in magic, format version and checksum.
void seal_superblock(Superblock& block);

// A superblock that was written by this version, or by one whose stores this one reads, and whose numbers fit together,
// so that no sum or product of them overflows and nothing is larger than the space. What its format does not have is
// filled in. `object` stands in errors: kCorrupt, kUnsupported (another version). `bytes`: at least sizeof(Superblock).
Superblock parse_superblock(std::span<const std::byte> bytes, const std::string& object);

}  // namespace spillway
