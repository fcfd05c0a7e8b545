// The manifest: what a store held at its last commits. Two records alternate, each stored twice; the newest valid one
// is the truth. Pure: bytes in, bytes out; TileStore (tile_store.h) writes and reads them.
//
//   | header | slot bits and checksums, tile after tile | update counts | caller's blob | … zeros … |   padded
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/store.h"
#include "swap/extents.h"

namespace spillway {

// 2: several paths; 3: the description names the optimizer; 4: two superblocks, a list of state arrays, update counts.
// Stores of older formats are used as they are: what theirs has no room for is refused.
inline constexpr std::uint32_t kFormatVersion = 4, kOldestFormatVersion = 3;
inline constexpr std::uint32_t kUpdateCountsFormat = 4;
inline constexpr std::uint64_t kBlobCapacity = 16 * kKiB;

struct TileCommit {
  std::uint8_t slot = 0;                // which of the two slots is committed
  std::uint64_t checksum[kParts] = {};  // of its extents
};

struct Manifest {
  std::uint64_t sequence = 0;  // commits so far; decides which record is newer
  std::uint64_t step = 0;
  std::vector<TileCommit> tiles;
  // Of every parameter, block after block as the model describes them, trainable or not: how many updates it has had.
  // Empty: not recorded, so that each has had every update that was not skipped.
  std::vector<std::uint64_t> update_counts;
  std::vector<std::byte> blob;
};

// What the form of a store's records follows from; one of another store is as good as damaged.
struct RecordForm {
  std::uint32_t version = kFormatVersion;
  std::uint64_t fingerprint = 0;
  std::uint64_t tiles = 0;
  std::uint64_t parameters = 0;  // 0 before kUpdateCountsFormat
};

// Capacity of one record, a multiple of kExtentAlignment.
std::uint64_t record_bytes(const RecordForm& form);

// Writes a whole record into `out` (record_bytes long). Allocates nothing. The blob must fit kBlobCapacity, and of
// update counts there are none or one for each parameter.
void encode_record(const Manifest& manifest, const RecordForm& form, std::span<std::byte> out);

// Reads a record. `manifest` is filled when the result is kValid; kEmpty: never written (all zeros in the header).
RecordState decode_record(std::span<const std::byte> bytes, const RecordForm& form, Manifest& manifest);

// Which of the four stored copies to go on from. `others_damaged`: a record that may have been newer cannot be read,
// so that every extent the chosen one names must be verified before use.
struct ManifestChoice {
  StoreRecords copies;
  std::optional<Manifest> manifest;
  std::optional<Manifest> older;  // the other record, where it can be read; its slots may be overwritten by now
  bool others_damaged = false;
};
// `records`: both copies of one, both of the other, each as long as it could be read.
ManifestChoice choose_manifest(std::span<const std::vector<std::byte>> records, const RecordForm& form);

}  // namespace spillway
