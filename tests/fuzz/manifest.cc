// What a store file begins with. | which | bytes |: with the highest bit of the first byte a superblock, else two
// commit records, of as many parameters and tiles as its other bits say. Parsers see the bytes as they are and once
// more with their checksum put right, since whoever forges a store does that.
#include "swap/manifest.h"

#include <algorithm>
#include <cstring>

#include "kernels/checksum.h"
#include "spillway/stripe_map.h"
#include "swap/superblock.h"
#include "tests/fuzz/targets.h"

namespace spillway::fuzz {
namespace {

using Record = std::vector<std::byte>;

// Bits: 4 of tiles, 2 of parameters, and whether it is of the oldest format, which has none.
RecordForm form_of(unsigned which) {
  const bool old = (which & 64u) != 0;
  return {.version = old ? kOldestFormatVersion : kFormatVersion,
          .fingerprint = 42,
          .tiles = which & 15u,
          .parameters = old ? 0 : which >> 4 & 3u};
}

template <class T>
T load(Bytes bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

Record padded(Bytes bytes, std::uint64_t size) {
  Record record(bytes.begin(),
                bytes.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(bytes.size(), size)));
  record.resize(size);
  return record;
}

// The oldest format's, whose checksum is its last word.
Record sealed_old_superblock(Bytes input) {
  constexpr std::size_t kChecksum = 112;
  Record bytes = padded(input, sizeof(Superblock));
  std::memcpy(bytes.data() + 8, &kOldestFormatVersion, sizeof kOldestFormatVersion);
  const std::uint64_t checksum = granule_checksum(std::span(bytes).first(kChecksum));
  std::memcpy(bytes.data() + kChecksum, &checksum, sizeof checksum);
  return bytes;
}

// The checksum stands in the second word, and covers what follows up to the length in the eighth.
Record sealed(Record record) {
  const auto used = load<std::uint64_t>(record, 56);
  if (used < 64 || used > record.size()) return record;
  const std::uint64_t checksum = granule_checksum(std::span(record).subspan(16, used - 16));
  std::memcpy(record.data() + 8, &checksum, sizeof checksum);
  return record;
}

void check_superblock(const Superblock& block) {
  if (block.format_version == kFormatVersion) {
    SPILLWAY_CHECK(parse_superblock(std::as_bytes(std::span(&block, 1)), "store").checksum == block.checksum,
                   "what was accepted once is accepted again");
  }
  SPILLWAY_CHECK(block.description_bytes <= block.total_bytes && block.scratch_bytes <= block.total_bytes,
                 "nothing is larger than the space");
  const RecordForm form{.version = block.format_version,
                        .fingerprint = block.fingerprint,
                        .tiles = block.tiles,
                        .parameters = block.parameters};
  SPILLWAY_CHECK(record_bytes(form) <= 3 * block.total_bytes + 2 * kMiB, "nor is a record of it");
  const std::vector<std::uint32_t> shares(block.shares, block.shares + block.parts);
  const StripeMap stripes(shares, block.unit_bytes, kExtentAlignment);
  std::uint64_t bytes = 0;
  for (std::uint32_t file = 0; file < block.parts; ++file) {
    const std::uint64_t size = stripes.file_bytes(file, block.total_bytes);
    SPILLWAY_CHECK(size <= block.total_bytes + kExtentAlignment + block.unit_bytes, "no size overflows");
    bytes += size;
  }
  SPILLWAY_CHECK(bytes >= block.total_bytes, "the files hold the space");
}

void superblock(Bytes input) {
  const Record bytes = padded(input, sizeof(Superblock));
  auto block = accepted([&] { return parse_superblock(bytes, "store"); });
  if (block) check_superblock(*block);
  auto forged = load<Superblock>(bytes, 0);
  seal_superblock(forged);
  block = accepted([&] { return parse_superblock(std::as_bytes(std::span(&forged, 1)), "store"); });
  if (block) check_superblock(*block);
  const Record old = sealed_old_superblock(input);
  block = accepted([&] { return parse_superblock(old, "store"); });
  if (block) check_superblock(*block);
}

void check_record(const Record& record, const RecordForm& form, const Manifest& manifest) {
  SPILLWAY_CHECK(manifest.tiles.size() == form.tiles && manifest.blob.size() <= kBlobCapacity, "sizes are the store's");
  SPILLWAY_CHECK(manifest.update_counts.empty() || manifest.update_counts.size() == form.parameters,
                 "updates are counted of all parameters or of none");
  Record again(record.size());
  encode_record(manifest, form, again);
  const auto used = static_cast<std::ptrdiff_t>(load<std::uint64_t>(record, 56));
  SPILLWAY_CHECK(std::equal(record.begin(), record.begin() + used, again.begin()), "the same bytes are written again");
}

void records(const RecordForm& form, Bytes input) {
  const std::uint64_t size = record_bytes(form);
  const Bytes half[] = {input.first(input.size() / 2), input.subspan(input.size() / 2)};
  std::vector<Record> copies;
  for (const Bytes bytes : half) {
    copies.push_back(padded(bytes, size));
    copies.push_back(sealed(copies.back()));
  }
  std::optional<std::uint64_t> newest;
  for (const Record& copy : copies) {
    Manifest manifest;
    if (decode_record(copy, form, manifest) != RecordState::kValid) continue;
    check_record(copy, form, manifest);
    newest = std::max(newest.value_or(0), manifest.sequence);
  }
  const ManifestChoice choice = choose_manifest(copies, form);
  SPILLWAY_CHECK(choice.manifest.has_value() == newest.has_value(), "a valid record is chosen where there is one");
  SPILLWAY_CHECK(!choice.manifest || choice.manifest->sequence == *newest, "and the newest");
  SPILLWAY_CHECK(!choice.older || (choice.manifest && choice.older->sequence <= *newest), "the other one is older");
}

}  // namespace

void manifest(Bytes input) {
  const unsigned which = take_byte(input);
  if (which >= 0x80) return superblock(input);
  records(form_of(which), input);
}

}  // namespace spillway::fuzz
