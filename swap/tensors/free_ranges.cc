#include "swap/tensors/free_ranges.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

#include "spillway/error.h"

namespace spillway {

FreeRanges::FreeRanges(std::uint64_t begin, std::uint64_t end) {
  if (begin < end) free_[begin] = end;
  free_bytes_ = begin < end ? end - begin : 0;
}

std::optional<Extent> FreeRanges::take(std::uint64_t bytes) {
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const std::uint64_t size = range->second - range->first;
    // Best fit: large ranges stay whole for large tensors.
    if (size >= bytes && (best == free_.end() || size < best->second - best->first)) best = range;
  }
  if (best == free_.end()) return std::nullopt;
  const Extent taken{best->first, bytes};
  take_at(taken);
  return taken;
}

std::vector<Extent> FreeRanges::take_in_parts(std::uint64_t bytes) {
  if (bytes > free_bytes_) return {};
  std::vector<Extent> parts;
  while (bytes > 0) {
    if (const auto whole = take(bytes)) {
      parts.push_back(*whole);
      return parts;
    }
    // Largest first, so that the parts are few.
    const auto largest =
        std::ranges::max_element(free_, {}, [](const auto& range) { return range.second - range.first; });
    parts.push_back({largest->first, largest->second - largest->first});
    take_at(parts.back());
    bytes -= parts.back().bytes;
  }
  return parts;
}

std::uint64_t FreeRanges::free_bytes_in(std::size_t ranges) const {
  if (free_.size() <= ranges) return free_bytes_;
  std::vector<std::uint64_t> sizes;
  for (const auto& [begin, end] : free_) sizes.push_back(end - begin);
  const auto last = sizes.begin() + static_cast<std::ptrdiff_t>(ranges);
  std::ranges::nth_element(sizes, last, std::ranges::greater{});
  return std::accumulate(sizes.begin(), last, std::uint64_t{0});
}

bool FreeRanges::take_at(const Extent& range) {
  const auto behind = free_.upper_bound(range.offset);
  if (behind == free_.begin() || range.bytes == 0) return false;
  const auto found = std::prev(behind);
  const auto [begin, end] = *found;
  if (range.offset > end || end - range.offset < range.bytes) return false;
  free_.erase(found);
  if (begin < range.offset) free_[begin] = range.offset;
  if (range.offset + range.bytes < end) free_[range.offset + range.bytes] = end;
  free_bytes_ -= range.bytes;
  return true;
}

void FreeRanges::give_back(const Extent& range) {
  if (range.bytes == 0) return;
  std::uint64_t begin = range.offset, end = range.offset + range.bytes;
  const auto behind = free_.lower_bound(begin);
  SPILLWAY_CHECK(behind == free_.end() || end <= behind->first, "what is given back was taken");
  // Neighbours become one range again, or space would fragment for good.
  if (behind != free_.end() && behind->first == end) {
    end = behind->second;
    free_.erase(behind);
  }
  if (const auto next = free_.lower_bound(begin); next != free_.begin()) {
    const auto before = std::prev(next);
    SPILLWAY_CHECK(before->second <= begin, "what is given back was taken");
    if (before->second == begin) {
      begin = before->first;
      free_.erase(before);
    }
  }
  free_[begin] = end;
  free_bytes_ += range.bytes;
}

}  // namespace spillway
