// What a commit of a store of named tensors says: which tensors there are, where their bytes lie and what their
// checksums are. Pure: values in, bytes out; tensor_files writes and reads them.
//
//   root record (one of two alternating ones, each stored twice)  →  where the table lies
//   table: tensor after tensor: name, type, shape, bytes, parts of the space, checksums of its blocks
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/tensor_store.h"
#include "swap/extents.h"

namespace spillway {

// What tensors are aligned to and padded to, in files and in memory.
inline constexpr std::uint64_t kTensorAlignment = 4 * kKiB;

struct TensorRecord {
  TensorShape shape;
  std::uint64_t bytes = 0;
  std::uint64_t block_bytes = 0;  // a multiple of kTensorAlignment; the last block is cut at padded_bytes()
  std::vector<Extent> parts;      // of the space, in the tensor's order; together padded_bytes()
  std::vector<std::uint64_t> checksums;

  std::uint64_t padded_bytes() const { return align_up(bytes, kTensorAlignment); }
  std::uint64_t blocks() const { return (padded_bytes() + block_bytes - 1) / block_bytes; }
};

// Calls body(offset in the space, piece of memory) for each run of `memory`, which are bytes of a tensor from `skip`
// on.
template <typename Body>
void for_each_run(std::span<const Extent> parts, std::uint64_t skip, std::span<std::byte> memory, const Body& body) {
  for (const Extent& part : parts) {
    if (memory.empty()) return;
    if (skip >= part.bytes) {
      skip -= part.bytes;
      continue;
    }
    const auto piece = memory.first(std::min<std::uint64_t>(part.bytes - skip, memory.size()));
    body(part.offset + skip, piece);
    memory = memory.subspan(piece.size());
    skip = 0;
  }
}

struct NamedRecord {
  std::string name;
  const TensorRecord* record = nullptr;
};
std::vector<std::byte> encode_table(std::span<const NamedRecord> tensors);
// What that takes: of no tensor, and of each.
inline constexpr std::uint64_t kEmptyTableBytes = sizeof(std::uint64_t);
std::uint64_t table_bytes(const std::string& name, const TensorRecord& record);

// Decodes what encode_table() wrote; nothing where its numbers are impossible, which a checksum does not tell.
struct ReadRecord {
  std::string name;
  TensorRecord record;
};
std::optional<std::vector<ReadRecord>> decode_table(std::span<const std::byte> bytes);

struct TableRoot {
  std::uint64_t commit = 0;  // counts from 1
  std::uint64_t bytes = 0;   // of the table
  std::uint64_t checksum = 0;
  std::vector<Extent> parts;  // of the space, at most kMostTableParts
};
inline constexpr std::size_t kMostTableParts = 200;
inline constexpr std::uint64_t kRootBytes = 4 * kKiB;

void encode_root(const TableRoot& root, std::span<std::byte> out);  // kRootBytes of it are written
enum class RootState : std::uint8_t { kValid, kEmpty, kDamaged };
RootState decode_root(std::span<const std::byte> bytes, TableRoot& root);

}  // namespace spillway
