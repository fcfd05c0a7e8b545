// The two superblocks of every file: read, checked, written anew. What the bytes mean: superblock.h.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"
#include "swap/store_files.h"

namespace spillway {
namespace {

bool has_two(const Superblock& block) { return block.format_version >= kTwoSuperblocksFormat; }

template <class Bytes>
bool equal_but_for_version(Bytes one, const Bytes& other) {
  constexpr std::size_t kAt = offsetof(Superblock, format_version), kBytes = sizeof(Superblock::format_version);
  std::copy_n(other.begin() + kAt, kBytes, one.begin() + kAt);
  return one == other;
}

// The second copy ends a file, so that it is found while the first one cannot be read.
std::uint64_t second_copy_in(std::uint64_t file_bytes) {
  const std::uint64_t blocks = file_bytes / kExtentAlignment;
  return blocks < 2 ? 0 : (blocks - 1) * kExtentAlignment;
}

}  // namespace

StoreFiles::PartBlock StoreFiles::read_part(const File& file) {
  const std::string path = file.path().string();
  const std::uint64_t size = file.size_bytes();
  if (size < kExtentAlignment) {
    throw Error(Code::kCorrupt, path, "too short to be a store", 0, Remedy::kReplace);
  }
  AlignedBuffer buffer(kExtentAlignment);
  std::optional<Error> failure, newer;  // of the first copy; of either
  const auto read = [&](std::uint64_t offset, PartBlock& part) -> std::optional<Superblock> {
    try {
      file.read_at(offset, buffer.bytes());
      std::memcpy(part.bytes.data(), buffer.data.get(), part.bytes.size());
      return parse_superblock(part.bytes, path);
    } catch (const Error& error) {
      if (!failure) failure = error;
      if (error.code() == Code::kUnsupported) newer = error;
      return std::nullopt;
    }
  };
  PartBlock first{}, second{};
  const auto first_says = read(0, first);
  // An older format has no second copy: whatever ends the file is not one.
  if (first_says && !has_two(*first_says)) return first;
  first.second = second.second = second_copy_in(size);
  const auto second_says = first.second > 0 ? read(first.second, second) : std::nullopt;
  const bool second_right = second_says && has_two(*second_says);
  // What another version wrote is no damage, unless all but the number is the other copy's: a flipped bit.
  if (newer && !equal_but_for_version(first.bytes, second.bytes)) throw *newer;
  if (!first_says && !second_right) throw *failure;
  PartBlock& right = first_says ? first : second;
  right.damaged = !first_says || !second_right || first.bytes != second.bytes;
  return right;
}

Superblock StoreFiles::superblock_of(const File& file) {
  return parse_superblock(read_part(file).bytes, file.path().string());
}

std::uint64_t StoreFiles::part_bytes(std::uint32_t file, std::uint64_t total_bytes) const {
  return has_two(block_) ? file_bytes(stripes_, file, total_bytes) : stripes_.file_bytes(file, total_bytes);
}

void StoreFiles::place_second(std::uint32_t file) {
  parts_[file].second = has_two(block_) ? second_copy_in(files_[file].size_bytes()) : 0;
}

void StoreFiles::write_copy(std::uint32_t file, std::uint64_t offset) {
  std::ranges::fill(look_.bytes(), std::byte{0});
  std::ranges::copy(parts_[file].bytes, look_.data.get());
  files_[file].write_at(offset, look_.bytes());
}

// Zeros are no damage but a hole: the file was cut, and made longer by a write beyond the cut.
StoreFiles::Copy StoreFiles::copy_at(std::uint32_t file, std::uint64_t offset) {
  const auto head = look_.bytes().first(align_up<std::uint64_t>(sizeof(Superblock), files_[file].alignment()));
  try {
    files_[file].read_at(offset, head);
  } catch (const Error&) {
    return Copy::kDamaged;
  }
  const auto found = head.first(sizeof(Superblock));
  if (std::ranges::equal(found, parts_[file].bytes)) return Copy::kRight;
  if (std::ranges::all_of(found, [](std::byte byte) { return byte == std::byte{0}; })) return Copy::kGone;
  try {
    const Superblock other = parse_superblock(found, "");
    const bool same = std::memcmp(other.store_id, block_.store_id, sizeof other.store_id) == 0;
    return same ? Copy::kDamaged : Copy::kGone;  // another store's
  } catch (const Error&) {
    return Copy::kDamaged;
  }
}

// One after the other, for as long as one is right nothing is lost. False: the file is not the store's any more.
bool StoreFiles::mend_copies(std::uint32_t file, bool in_use) {
  PartBlock& part = parts_[file];
  const std::uint64_t places[] = {0, part.second};
  const std::size_t copies = part.second > 0 ? 2 : 1;
  std::size_t right = 0, damaged = 0;
  std::optional<std::string> failure;
  for (std::size_t copy = 0; copy < copies; ++copy) {
    const Copy found = copy_at(file, places[copy]);
    if (found == Copy::kRight) {
      ++right;
      continue;
    }
    if (found == Copy::kGone && in_use) return false;
    ++damaged;
    try {
      write_copy(file, places[copy]);
      files_[file].sync();
      ++right;
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  part.damaged = failure.has_value();
  if (damaged == 0 || (failure && std::exchange(part.told, true))) return right > 0;
  const char* what = copies == 1    ? "its superblock was"
                     : damaged == 2 ? "both of its superblocks were"
                                    : "one of its two superblocks was";
  log(LogLevel::kWarning,
      failure
          ? fmt::format("{}: {} damaged and cannot be written anew; {}", files_[file].path().string(), what, *failure)
          : fmt::format("{}: {} damaged and is written anew", files_[file].path().string(), what));
  return right > 0;
}

}  // namespace spillway
