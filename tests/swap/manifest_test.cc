#include "swap/manifest.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

constexpr std::uint64_t kTiles = 5, kParameters = 7;
constexpr RecordForm kForm{.fingerprint = 77, .tiles = kTiles, .parameters = kParameters};
constexpr std::size_t kUsedBytes = 72 + kTiles * 24 + kParameters * 8 + 33;

Manifest manifest_of(std::uint64_t sequence) {
  Manifest manifest{.sequence = sequence, .step = sequence * 10, .tiles = {}, .update_counts = {}, .blob = {}};
  for (std::uint64_t t = 0; t < kTiles; ++t) {
    manifest.tiles.push_back(
        {.slot = static_cast<std::uint8_t>((t + sequence) % 2), .checksum = {t * 3 + sequence, t * 7}});
  }
  for (std::uint64_t p = 0; p < kParameters; ++p) manifest.update_counts.push_back(sequence * 10 - p);
  for (int i = 0; i < 33; ++i) manifest.blob.push_back(static_cast<std::byte>(i + static_cast<int>(sequence)));
  return manifest;
}

std::vector<std::byte> record_of(const Manifest& manifest, const RecordForm& form = kForm) {
  std::vector<std::byte> bytes(record_bytes(form));
  encode_record(manifest, form, bytes);
  return bytes;
}

std::vector<std::byte> record_of(std::uint64_t sequence) { return record_of(manifest_of(sequence)); }

std::vector<std::byte> empty_record() { return std::vector<std::byte>(record_bytes(kForm)); }

// The record is only ever torn within what means something; the zeros after it are padding.
std::vector<std::byte> torn(std::vector<std::byte> bytes, std::size_t keep) {
  std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(keep), bytes.end(), std::byte{0});
  return bytes;
}

TEST(Manifest, RoundTrips) {
  Manifest read;
  ASSERT_EQ(decode_record(record_of(4), kForm, read), RecordState::kValid);
  const Manifest written = manifest_of(4);
  EXPECT_EQ(read.sequence, written.sequence);
  EXPECT_EQ(read.step, written.step);
  EXPECT_EQ(read.update_counts, written.update_counts);
  EXPECT_EQ(read.blob, written.blob);
  for (std::size_t t = 0; t < kTiles; ++t) {
    EXPECT_EQ(read.tiles[t].slot, written.tiles[t].slot);
    EXPECT_EQ(read.tiles[t].checksum[0], written.tiles[t].checksum[0]);
    EXPECT_EQ(read.tiles[t].checksum[1], written.tiles[t].checksum[1]);
  }
}

// A model without a count of its updates, and what was in `read` before.
TEST(Manifest, CountsThatWereNotRecordedComeBackAsNone) {
  Manifest written = manifest_of(4), read = manifest_of(3);
  written.update_counts.clear();
  ASSERT_EQ(decode_record(record_of(written), kForm, read), RecordState::kValid);
  EXPECT_TRUE(read.update_counts.empty());
  EXPECT_EQ(read.blob, written.blob);
}

// 3 tiles less are as long as 9 counts.
TEST(Manifest, ARecordThatCountsOtherParametersIsDamaged) {
  Manifest read;
  RecordForm other = kForm;
  ++other.parameters;
  EXPECT_EQ(decode_record(record_of(3), other, read), RecordState::kDamaged);
  other = {.fingerprint = kForm.fingerprint, .tiles = kTiles - 3, .parameters = kParameters + 9};
  EXPECT_EQ(decode_record(record_of(3), other, read), RecordState::kDamaged);
}

TEST(Manifest, ARecordHasRoomForACountOfEveryParameter) {
  constexpr RecordForm kMany{.fingerprint = 1, .tiles = 1, .parameters = 100'000};
  const Manifest written{.sequence = 1,
                         .step = 9,
                         .tiles = std::vector<TileCommit>(1),
                         .update_counts = std::vector<std::uint64_t>(kMany.parameters, 9),
                         .blob = std::vector<std::byte>(kBlobCapacity, std::byte{7})};
  Manifest read;
  ASSERT_EQ(decode_record(record_of(written, kMany), kMany, read), RecordState::kValid);
  EXPECT_EQ(read.update_counts, written.update_counts);
  EXPECT_EQ(read.blob, written.blob);
}

TEST(Manifest, EveryFlippedBitOfARecordIsNoticed) {
  const std::vector<std::byte> good = record_of(3);
  for (std::size_t bit = 0; bit < kUsedBytes * 8; ++bit) {
    std::vector<std::byte> bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    Manifest read;
    EXPECT_EQ(decode_record(bad, kForm, read), RecordState::kDamaged) << "bit " << bit;
  }
}

TEST(Manifest, ARecordOfAnotherModelOrSizeIsDamaged) {
  Manifest read;
  RecordForm other = kForm;
  ++other.fingerprint;
  EXPECT_EQ(decode_record(record_of(3), other, read), RecordState::kDamaged);
  other = kForm;
  ++other.tiles;
  EXPECT_EQ(decode_record(record_of(3), other, read), RecordState::kDamaged);
  EXPECT_EQ(decode_record(empty_record(), kForm, read), RecordState::kEmpty);
}

TEST(Manifest, TheNewestValidRecordWinsAndALostNewerOneIsReported) {
  struct Case {
    std::vector<std::vector<std::byte>> records;  // A, A', B, B'
    std::optional<std::uint64_t> sequence;
    bool others_damaged;
    std::optional<std::uint64_t> older = std::nullopt;
  };
  const std::vector<Case> cases = {
      {{empty_record(), empty_record(), empty_record(), empty_record()}, std::nullopt, false},
      {{empty_record(), empty_record(), record_of(1), record_of(1)}, 1, false},
      {{record_of(2), record_of(2), record_of(1), record_of(1)}, 2, false, 1},
      {{record_of(2), record_of(2), record_of(3), record_of(1)}, 3, false, 2},             // crash between the copies
      {{record_of(2), record_of(2), torn(record_of(3), 100), record_of(1)}, 2, false, 1},  // crash in the first copy
      {{record_of(2), {}, record_of(3), record_of(3)}, 3, false, 2},                       // a copy cannot be read
      {{record_of(2), record_of(2), torn(record_of(3), 100), torn(record_of(3), 70)}, 2, true},
      {{torn(record_of(2), 90), torn(record_of(2), 80), torn(record_of(3), 100), torn(record_of(3), 70)},
       std::nullopt,
       true},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const ManifestChoice choice = choose_manifest(cases[i].records, kForm);
    EXPECT_EQ(choice.manifest.has_value(), cases[i].sequence.has_value()) << "case " << i;
    if (choice.manifest) {
      EXPECT_EQ(choice.manifest->sequence, *cases[i].sequence) << "case " << i;
    }
    EXPECT_EQ(choice.others_damaged, cases[i].others_damaged) << "case " << i;
    EXPECT_EQ(choice.older.has_value(), cases[i].older.has_value()) << "case " << i;
    if (choice.older && cases[i].older) {
      EXPECT_EQ(choice.older->sequence, *cases[i].older) << "case " << i;
    }
  }
}

TEST(Manifest, EveryCopyIsToldAsItWasFound) {
  const std::vector<std::vector<std::byte>> records = {record_of(2), torn(record_of(2), 90), empty_record(), {}};
  const StoreRecords found = choose_manifest(records, kForm).copies;
  EXPECT_EQ(found[0][0].state, RecordState::kValid);
  EXPECT_EQ(found[0][0].sequence, 2u);
  EXPECT_EQ(found[0][0].step, 20u);
  EXPECT_EQ(found[0][1].state, RecordState::kDamaged);
  EXPECT_EQ(found[1][0].state, RecordState::kEmpty);
  EXPECT_EQ(found[1][1].state, RecordState::kDamaged);
}

}  // namespace
}  // namespace spillway
