#include "swap/manifest.h"

#include <cstring>

#include "kernels/checksum.h"
#include "spillway/error.h"

namespace spillway {
namespace {

constexpr std::uint64_t kRecordMagic = 0x32304e414d575053;           // "SPWMAN02"
constexpr std::uint64_t kRecordOfFormat3Magic = 0x31304e414d575053;  // "SPWMAN01"

struct RecordHeader {
  std::uint64_t magic;
  std::uint64_t checksum;  // of every byte after this field, up to `used`
  std::uint64_t fingerprint;
  std::uint64_t sequence;
  std::uint64_t step;
  std::uint64_t tiles;
  std::uint64_t blob_bytes;
  std::uint64_t used;           // bytes of the record that mean something
  std::uint64_t update_counts;  // from kUpdateCountsFormat on
};
static_assert(sizeof(RecordHeader) == 72);
constexpr std::size_t kChecksumFrom = 16;
constexpr std::uint64_t kTileBytes = 8 + 8 * kParts;  // slot, checksums
constexpr std::uint64_t kCountBytes = sizeof(std::uint64_t);

bool has_counts(const RecordForm& form) { return form.version >= kUpdateCountsFormat; }
std::uint64_t magic_of(const RecordForm& form) { return has_counts(form) ? kRecordMagic : kRecordOfFormat3Magic; }
std::uint64_t header_bytes(const RecordForm& form) {
  return has_counts(form) ? sizeof(RecordHeader) : offsetof(RecordHeader, update_counts);
}

std::uint64_t used_bytes(const RecordForm& form, std::uint64_t counts, std::uint64_t blob) {
  return header_bytes(form) + form.tiles * kTileBytes + counts * kCountBytes + blob;
}

template <typename T>
T load(std::span<const std::byte> bytes, std::uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <typename T>
void store(std::span<std::byte> bytes, std::uint64_t at, const T& value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

}  // namespace

std::uint64_t record_bytes(const RecordForm& form) {
  return align_up(used_bytes(form, form.parameters, kBlobCapacity), kExtentAlignment);
}

void encode_record(const Manifest& manifest, const RecordForm& form, std::span<std::byte> out) {
  const std::uint64_t counts = manifest.update_counts.size();
  SPILLWAY_CHECK(out.size() >= record_bytes(form), "a record's buffer holds the whole record");
  SPILLWAY_CHECK(manifest.tiles.size() == form.tiles, "a record names every tile");
  SPILLWAY_CHECK(counts == 0 || counts == form.parameters, "updates are counted of all parameters or of none");
  SPILLWAY_CHECK(manifest.blob.size() <= kBlobCapacity, "the caller's blob fits the record");
  // What an earlier record left must not look like a part of this one.
  std::memset(out.data(), 0, out.size());
  RecordHeader header{.magic = magic_of(form),
                      .checksum = 0,
                      .fingerprint = form.fingerprint,
                      .sequence = manifest.sequence,
                      .step = manifest.step,
                      .tiles = form.tiles,
                      .blob_bytes = manifest.blob.size(),
                      .used = used_bytes(form, counts, manifest.blob.size()),
                      .update_counts = counts};
  std::uint64_t at = header_bytes(form);
  for (const TileCommit& tile : manifest.tiles) {
    store(out, at, static_cast<std::uint64_t>(tile.slot));
    std::memcpy(out.data() + at + 8, tile.checksum, sizeof tile.checksum);
    at += kTileBytes;
  }
  if (counts > 0) std::memcpy(out.data() + at, manifest.update_counts.data(), counts * kCountBytes);
  at += counts * kCountBytes;
  if (!manifest.blob.empty()) std::memcpy(out.data() + at, manifest.blob.data(), manifest.blob.size());
  std::memcpy(out.data(), &header, header_bytes(form));
  // Over all that means something, sizes included; the zeros after it are padding.
  header.checksum = granule_checksum(out.subspan(kChecksumFrom, header.used - kChecksumFrom));
  std::memcpy(out.data(), &header, header_bytes(form));
}

RecordState decode_record(std::span<const std::byte> bytes, const RecordForm& form, Manifest& manifest) {
  if (bytes.size() < sizeof(RecordHeader)) return RecordState::kDamaged;
  auto header = load<RecordHeader>(bytes, 0);
  if (!has_counts(form)) header.update_counts = 0;
  // A record that was never written is zeros, since a store's space is made so.
  const RecordHeader empty{};
  if (std::memcmp(&header, &empty, sizeof header) == 0) return RecordState::kEmpty;
  // Sizes are checked before they are used: a damaged record may hold anything.
  if (header.magic != magic_of(form) || header.tiles != form.tiles || header.blob_bytes > kBlobCapacity ||
      (header.update_counts != 0 && header.update_counts != form.parameters) ||
      header.used != used_bytes(form, header.update_counts, header.blob_bytes) || header.used > bytes.size() ||
      header.checksum != granule_checksum(bytes.subspan(kChecksumFrom, header.used - kChecksumFrom)) ||
      header.fingerprint != form.fingerprint) {
    return RecordState::kDamaged;
  }
  manifest.sequence = header.sequence;
  manifest.step = header.step;
  manifest.tiles.resize(form.tiles);
  std::uint64_t at = header_bytes(form);
  for (TileCommit& tile : manifest.tiles) {
    const auto slot = load<std::uint64_t>(bytes, at);
    if (slot > 1) return RecordState::kDamaged;
    tile.slot = static_cast<std::uint8_t>(slot);
    std::memcpy(tile.checksum, bytes.data() + at + 8, sizeof tile.checksum);
    at += kTileBytes;
  }
  manifest.update_counts.resize(header.update_counts);
  if (header.update_counts > 0)
    std::memcpy(manifest.update_counts.data(), bytes.data() + at, header.update_counts * kCountBytes);
  at += header.update_counts * kCountBytes;
  manifest.blob.assign(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       bytes.begin() + static_cast<std::ptrdiff_t>(at + header.blob_bytes));
  return RecordState::kValid;
}

ManifestChoice choose_manifest(std::span<const std::vector<std::byte>> records, const RecordForm& form) {
  SPILLWAY_CHECK(records.size() == 4, "two records, two copies each");
  ManifestChoice choice;
  std::optional<Manifest> newest[2];
  for (std::size_t record = 0; record < 2; ++record) {
    bool damaged = false;
    for (std::size_t copy = 0; copy < 2; ++copy) {
      Manifest manifest;
      RecordCopy& found = choice.copies[record][copy];
      found.state = decode_record(records[record * 2 + copy], form, manifest);
      damaged |= found.state == RecordState::kDamaged;
      if (found.state != RecordState::kValid) continue;
      found.sequence = manifest.sequence;
      found.step = manifest.step;
      // Two copies of a record may differ after a crash between their writes: the newer one was written whole.
      if (!newest[record] || manifest.sequence > newest[record]->sequence) newest[record] = std::move(manifest);
    }
    // The record that is lost may have been the newest: then the other one's slots may be half overwritten.
    if (damaged && !newest[record]) choice.others_damaged = true;
  }
  const bool second = newest[1] && (!newest[0] || newest[1]->sequence > newest[0]->sequence);
  choice.manifest = std::move(newest[second ? 1 : 0]);
  choice.older = std::move(newest[second ? 0 : 1]);
  return choice;
}

}  // namespace spillway
