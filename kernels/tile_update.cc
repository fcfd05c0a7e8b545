#include "kernels/tile_update.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>

#include "kernels/optimizer.h"
#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// A worker takes a group of elements, whose arrays fill whole granules, and goes through it piece by piece: the hash
// before an update finds its piece in the first-level cache, and so does the hash after it. Longer pieces would leave
// that cache, shorter ones pay more for starting and ending XXH3's stream.
constexpr std::size_t kPiece = kUpdatePiece;
// Memory would stand idle while an array is hashed in the cache: the first lines of a later piece are asked for, about
// as many as a processor has under way at once (0.38 instead of 0.47 ns a bf16 parameter for the checksums).
constexpr std::size_t kLinesAsked = 12;
constexpr std::size_t kUnhashedChunk = 16 * kKiB;  // elements that a worker takes when nothing is hashed beside

// Elements [begin, end) by the scalars of their groups, if they have some.
bool update_elements(const TileUpdate& update, std::uint64_t begin, std::uint64_t end, OptimizerFunction function) {
  bool finite = true;
  auto range = std::ranges::upper_bound(update.groups, begin, {}, &GroupRange::end);
  for (; begin < end; ++range) {
    const std::uint64_t until = std::min(end, range->end);
    if (range->group != kNotUpdated) finite &= function(update.tile, update.scalars[range->group], begin, until);
    begin = until;
  }
  return finite;
}

// One array of the tile, hashed before and after its update.
struct HashedArray {
  // `first`: the group's first element. The array starts, and the group in it, at a multiple of the granule.
  HashedArray(const ExtentHashes& extent, const std::byte* array, std::uint64_t first, std::uint64_t element_bytes)
      : begin(array + first * element_bytes),
        element(element_bytes),
        before(sum_of(extent, extent.before)),
        after(sum_of(extent, extent.after)) {}

  std::span<const std::byte> piece(std::size_t at) const { return {begin + at * element, kPiece * element}; }

  void ask(std::size_t at) const {
    for (std::size_t line = 0; line < kLinesAsked; ++line) __builtin_prefetch(piece(at).data() + 64 * line, 0, 3);
  }

  // Where the checksum of the granule at `begin` goes; null: it is not wanted.
  std::uint64_t* sum_of(const ExtentHashes& extent, std::span<std::uint64_t> sums) const {
    return sums.empty() ? nullptr : &sums[static_cast<std::uint64_t>(begin - extent.bytes.data()) / kGranuleBytes];
  }

  const std::byte* begin;
  std::uint64_t element;
  GranuleHasher before, after;
};

std::array<const ExtentHashes*, 3> extents_of(const TileUpdate& update) {
  return {&update.weights, &update.states, &update.gradient};
}

bool is_hashed(const TileUpdate& update) {
  return std::ranges::any_of(extents_of(update),
                             [](const ExtentHashes* e) { return !e->before.empty() || !e->after.empty(); });
}

// Elements of a group.
std::size_t group_of(const TileUpdate& update) {
  const bool bytes = std::ranges::any_of(extents_of(update), [](const ExtentHashes* extent) {
    return std::ranges::find(extent->arrays, std::uint64_t{1}) != extent->arrays.end();
  });
  return bytes ? kHashedByteUnit : kHashedTileUnit;
}

// Of the extent's arrays, without what lies after them.
std::uint64_t array_bytes(const ExtentHashes& extent, const TileUpdate& update) {
  std::uint64_t bytes = 0;  // of all arrays, for an element
  for (const std::uint64_t element : extent.arrays) bytes += element;
  return bytes * update.tile.count;
}

// Whether each group's part of each array is whole granules.
bool in_whole_granules(const TileUpdate& update, std::size_t group) {
  return update.tile.count % group == 0 && std::ranges::all_of(extents_of(update), [&](const ExtentHashes* extent) {
           const std::uint64_t bytes = array_bytes(*extent, update);
           return (bytes > 0 || extent->bytes.empty()) && bytes <= extent->bytes.size() &&
                  std::ranges::all_of(extent->arrays,
                                      [&](std::uint64_t element) { return element * group % kGranuleBytes == 0; });
         });
}

using Sums = std::span<std::uint64_t> ExtentHashes::*;

// What lies after the arrays: of int8 moments their scales, a sixteenth of the values.
void hash_behind_arrays(const TileUpdate& update, Sums sums, HostWorkers& workers) {
  for (const ExtentHashes* extent : extents_of(update)) {
    const std::uint64_t at = array_bytes(*extent, update);
    const std::span<std::uint64_t> wanted = extent->*sums;
    if (wanted.empty() || at == extent->bytes.size()) continue;
    granule_checksums(extent->bytes.subspan(at), wanted.subspan(at / kGranuleBytes), workers);
  }
}

bool update_group(const TileUpdate& update, std::size_t first, std::size_t end) {
  std::array<std::optional<HashedArray>, 3 * std::tuple_size_v<ElementBytes>> arrays;
  std::size_t count = 0;
  for (const ExtentHashes* extent : extents_of(update)) {
    const std::byte* array = extent->bytes.data();
    for (const std::uint64_t bytes : extent->arrays) {
      if (array == nullptr || bytes == 0) break;
      arrays[count++].emplace(*extent, array, first, bytes);
      array += bytes * update.tile.count;
    }
  }
  bool finite = true;
  for (std::size_t at = 0; at < end - first; at += kPiece) {
    for (std::size_t i = 0; i < count; ++i) arrays[i]->before.add(arrays[i]->piece(at)), arrays[i]->ask(at + kPiece);
    finite &= update_elements(update, first + at, first + at + kPiece, optimizer_update_piece);
    for (std::size_t i = 0; i < count; ++i) arrays[i]->after.add(arrays[i]->piece(at)), arrays[i]->ask(at + 2 * kPiece);
  }
  return finite;
}

// Chunks of the tile on the workers, each by body(begin, end).
template <class Body>
bool in_chunks(std::size_t count, std::size_t chunk, HostWorkers& workers, Body body) {
  std::atomic<bool> finite = true;
  workers.parallel_for(div_up(count, chunk), [&](std::size_t i) {
    if (!body(i * chunk, std::min(count, (i + 1) * chunk))) finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

}  // namespace

bool update_tile(const TileUpdate& update, HostWorkers& workers) {
  SPILLWAY_CHECK(!update.groups.empty() && update.groups.back().end == update.tile.count,
                 "every element belongs to a parameter group");
  const std::size_t count = update.tile.count;
  const std::size_t group = group_of(update);
  if (is_hashed(update) && in_whole_granules(update, group)) {
    hash_behind_arrays(update, &ExtentHashes::before, workers);
    const bool finite = in_chunks(count, group, workers,
                                  [&](std::size_t first, std::size_t end) { return update_group(update, first, end); });
    hash_behind_arrays(update, &ExtentHashes::after, workers);
    return finite;
  }
  // The granules of a tile's uneven end hold several arrays, or parts of two groups: three passes.
  for (const ExtentHashes& extent : {update.weights, update.states, update.gradient}) {
    granule_checksums(extent.bytes, extent.before, workers);
  }
  const bool finite = in_chunks(count, kUnhashedChunk, workers, [&](std::size_t begin, std::size_t end) {
    return update_elements(update, begin, end, optimizer_update);
  });
  for (const ExtentHashes& extent : {update.weights, update.states}) {
    granule_checksums(extent.bytes, extent.after, workers);
  }
  return finite;
}

}  // namespace spillway
