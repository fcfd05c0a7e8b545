#include "swap/tensors/tensor_table.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/checksum.h"
#include "spillway/error.h"

namespace spillway {
namespace {

constexpr std::uint64_t kRootMagic = 0x31544f4f52545053;  // "SPTROOT1"

class TableWriter {
 public:
  void number(std::uint64_t value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void numbers(std::span<const std::uint64_t> values) {
    number(values.size());
    const auto bytes = std::as_bytes(values);
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void text(const std::string& value) {
    number(value.size());
    const auto bytes = std::as_bytes(std::span(value));
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void extents(std::span<const Extent> values) {
    number(values.size());
    for (const Extent& value : values) number(value.offset), number(value.bytes);
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

// Ends at the first thing that cannot be.
class TableReader {
 public:
  explicit TableReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool failed() const { return failed_; }
  bool at_end() const { return rest_.empty(); }
  std::uint64_t number() {
    std::uint64_t value = 0;
    copy(std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  // How many of `size` bytes each follow.
  std::uint64_t count(std::uint64_t size) {
    const std::uint64_t count = number();
    // Before anything is allocated: a damaged count must not take all memory.
    if (count > rest_.size() / size) failed_ = true;
    return failed_ ? 0 : count;
  }
  std::vector<std::uint64_t> numbers() {
    std::vector<std::uint64_t> values(count(sizeof(std::uint64_t)));
    copy(std::as_writable_bytes(std::span(values)));
    return values;
  }
  std::string text() {
    std::string value(count(1), '\0');
    copy(std::as_writable_bytes(std::span(value)));
    return value;
  }
  std::vector<Extent> extents() {
    std::vector<Extent> values(count(2 * sizeof(std::uint64_t)));
    for (Extent& value : values) value.offset = number(), value.bytes = number();
    return values;
  }

 private:
  void copy(std::span<std::byte> out) {
    if (failed_ || rest_.size() < out.size()) {
      failed_ = true;
      return;
    }
    if (!out.empty()) std::memcpy(out.data(), rest_.data(), out.size());
    rest_ = rest_.subspan(out.size());
  }

  std::span<const std::byte> rest_;
  bool failed_ = false;
};

bool parts_hold(std::span<const Extent> parts, std::uint64_t bytes) {
  for (const Extent& part : parts) {
    if (part.bytes == 0 || part.bytes % kTensorAlignment != 0 || part.offset % kTensorAlignment != 0) return false;
    if (part.bytes > bytes || part.offset > std::numeric_limits<std::uint64_t>::max() - part.bytes) return false;
    bytes -= part.bytes;
  }
  return bytes == 0;
}

bool can_be(const TensorRecord& record) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;
  if (record.bytes > kMostBytes || record.block_bytes == 0 || record.block_bytes > kMostBytes) return false;
  if (record.block_bytes % kTensorAlignment != 0) return false;
  return record.checksums.size() == record.blocks() && parts_hold(record.parts, record.padded_bytes());
}

}  // namespace

std::vector<std::byte> encode_table(std::span<const NamedRecord> tensors) {
  TableWriter table;
  table.number(tensors.size());
  for (const auto& [name, record] : tensors) {
    table.text(name);
    table.text(record->shape.type);
    table.numbers(record->shape.dims);
    table.number(record->bytes);
    table.number(record->block_bytes);
    table.extents(record->parts);
    table.numbers(record->checksums);
  }
  return table.take();
}

std::uint64_t table_bytes(const std::string& name, const TensorRecord& record) {
  constexpr std::uint64_t kNumbers = 7;  // bytes and block_bytes, and the counts of the other five
  return name.size() + record.shape.type.size() +
         sizeof(std::uint64_t) *
             (kNumbers + record.shape.dims.size() + 2 * record.parts.size() + record.checksums.size());
}

std::optional<std::vector<ReadRecord>> decode_table(std::span<const std::byte> bytes) {
  TableReader table(bytes);
  // A tensor takes seven numbers at the least, even one without dimensions, parts or checksums.
  const std::uint64_t count = table.count(7 * sizeof(std::uint64_t));
  std::vector<ReadRecord> tensors;
  for (std::uint64_t i = 0; i < count; ++i) {
    ReadRecord read;
    read.name = table.text();
    read.record.shape.type = table.text();
    read.record.shape.dims = table.numbers();
    read.record.bytes = table.number();
    read.record.block_bytes = table.number();
    read.record.parts = table.extents();
    read.record.checksums = table.numbers();
    if (table.failed() || !can_be(read.record)) return std::nullopt;
    tensors.push_back(std::move(read));
  }
  // Bytes that are left over are damage, too.
  if (table.failed() || !table.at_end()) return std::nullopt;
  return tensors;
}

void encode_root(const TableRoot& root, std::span<std::byte> out) {
  SPILLWAY_CHECK(root.parts.size() <= kMostTableParts && out.size() >= kRootBytes, "a root record has room for them");
  TableWriter text;
  text.number(kRootMagic);
  text.number(root.commit);
  text.number(root.bytes);
  text.number(root.checksum);
  text.extents(root.parts);
  const std::vector<std::byte> bytes = text.take();
  // The checksum covers the whole record, so its rest must be the same whenever it is written.
  std::ranges::fill(out.first(kRootBytes), std::byte{0});
  std::ranges::copy(bytes, out.begin());
  const std::uint64_t checksum = granule_checksum(out.first(kRootBytes - sizeof(std::uint64_t)));
  std::memcpy(out.data() + kRootBytes - sizeof checksum, &checksum, sizeof checksum);
}

RootState decode_root(std::span<const std::byte> bytes, TableRoot& root) {
  bytes = bytes.first(kRootBytes);
  // A new store has zeros here until its first commits: nothing is damaged.
  if (std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; })) return RootState::kEmpty;
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + kRootBytes - sizeof checksum, sizeof checksum);
  const auto text = bytes.first(kRootBytes - sizeof checksum);
  TableReader reader(text);
  if (granule_checksum(text) != checksum || reader.number() != kRootMagic) return RootState::kDamaged;
  root.commit = reader.number();
  root.bytes = reader.number();
  root.checksum = reader.number();
  root.parts = reader.extents();
  const bool whole = !reader.failed() && root.bytes < std::uint64_t{1} << 60 && root.parts.size() <= kMostTableParts &&
                     parts_hold(root.parts, align_up(root.bytes, kTensorAlignment));
  return whole ? RootState::kValid : RootState::kDamaged;
}

}  // namespace spillway
