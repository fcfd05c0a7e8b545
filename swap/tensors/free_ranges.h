// Which parts of a space are free: of an arena in host memory, or of the files of a store. Pure: whose the others are
// is known to tensor_store and tensor_table.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "swap/extents.h"

namespace spillway {

class FreeRanges {
 public:
  // [begin, end) is free. All numbers of bytes, here and below, are multiples of one unit, which is the caller's.
  FreeRanges(std::uint64_t begin, std::uint64_t end);

  // The smallest range that holds `bytes`, or its first part; nothing where no range does.
  std::optional<Extent> take(std::uint64_t bytes);
  // The same in several parts where no range is large enough, the largest first; empty where all of them together are
  // not.
  std::vector<Extent> take_in_parts(std::uint64_t bytes);
  // Exactly this one; false where any of it is taken.
  bool take_at(const Extent& range);
  void give_back(const Extent& range);

  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  // Of so many ranges, the largest ones.
  std::uint64_t free_bytes_in(std::size_t ranges) const;

 private:
  std::map<std::uint64_t, std::uint64_t> free_;  // begin → end; no two touch
  std::uint64_t free_bytes_ = 0;
};

}  // namespace spillway
