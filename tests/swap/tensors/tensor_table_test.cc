#include "swap/tensors/tensor_table.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/seed.h"

namespace spillway {
namespace {

std::vector<ReadRecord> some_tensors() {
  ReadRecord large{"model.layers.0.größe", {{"float32", {3, 5, 1000}}, 60'000, 4096, {}, {}}};
  large.record.parts = {{65536, 40'960}, {4'096'000, 20'480}};
  for (std::uint64_t i = 0; i < large.record.blocks(); ++i) large.record.checksums.push_back(i * 0x9e3779b97f4a7c15);
  ReadRecord empty{"", {{"uint8", {0}}, 0, 65536, {}, {}}};
  return {large, empty};
}

std::vector<std::byte> encoded(const std::vector<ReadRecord>& tensors) {
  std::vector<NamedRecord> named;
  for (const ReadRecord& tensor : tensors) named.push_back({tensor.name, &tensor.record});
  return encode_table(named);
}

TEST(TensorTable, SaysWhatItWasTold) {
  const auto wanted = some_tensors();
  const auto read = decode_table(encoded(wanted));
  ASSERT_TRUE(read);
  ASSERT_EQ(wanted.size(), read->size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const TensorRecord &one = wanted[i].record, &other = (*read)[i].record;
    EXPECT_EQ(wanted[i].name, (*read)[i].name);
    EXPECT_EQ(one.shape, other.shape);
    EXPECT_EQ(one.bytes, other.bytes);
    EXPECT_EQ(one.block_bytes, other.block_bytes);
    EXPECT_EQ(one.checksums, other.checksums);
    ASSERT_EQ(one.parts.size(), other.parts.size());
    for (std::size_t p = 0; p < one.parts.size(); ++p) {
      EXPECT_EQ(one.parts[p].offset, other.parts[p].offset);
      EXPECT_EQ(one.parts[p].bytes, other.parts[p].bytes);
    }
  }
  EXPECT_TRUE(decode_table(encoded({}))->empty());
  std::uint64_t bytes = kEmptyTableBytes;
  EXPECT_EQ(encoded({}).size(), bytes);
  for (const ReadRecord& tensor : wanted) bytes += table_bytes(tensor.name, tensor.record);
  EXPECT_EQ(encoded(wanted).size(), bytes);
}

TEST(TensorTable, WhatEndsEarlyOrLateIsNone) {
  auto bytes = encoded(some_tensors());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_table(std::span(bytes).first(size))) << size;
  }
  bytes.push_back({});
  EXPECT_FALSE(decode_table(bytes));
}

// The checksum is the files' matter; here no bytes may lead further than they go.
TEST(TensorTable, AnyBytesAreReadOrRefused) {
  std::mt19937_64 random(test_seed());
  const auto whole = encoded(some_tensors());
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = whole;
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    const auto read = decode_table(bytes);
    if (!read) continue;
    for (const ReadRecord& tensor : *read) EXPECT_EQ(tensor.record.blocks(), tensor.record.checksums.size());
  }
}

TEST(TensorTable, ARootIsReadEmptyOrDamaged) {
  std::vector<std::byte> bytes(kRootBytes);
  TableRoot root;
  EXPECT_EQ(RootState::kEmpty, decode_root(bytes, root));
  const TableRoot wanted{7, 5000, 99, {{65536, 4096}, {131072, 4096}}};
  encode_root(wanted, bytes);
  ASSERT_EQ(RootState::kValid, decode_root(bytes, root));
  EXPECT_EQ(7u, root.commit);
  EXPECT_EQ(5000u, root.bytes);
  EXPECT_EQ(99u, root.checksum);
  ASSERT_EQ(2u, root.parts.size());
  EXPECT_EQ(131072u, root.parts[1].offset);
  for (std::size_t i = 0; i < bytes.size(); i += 7) {
    auto damaged = bytes;
    damaged[i] ^= std::byte{4};
    EXPECT_EQ(RootState::kDamaged, decode_root(damaged, root)) << i;
  }
  // Sums that do not hold what they say.
  TableRoot wrong = wanted;
  wrong.parts.pop_back();
  encode_root(wrong, bytes);
  EXPECT_EQ(RootState::kDamaged, decode_root(bytes, root));
}

}  // namespace
}  // namespace spillway
