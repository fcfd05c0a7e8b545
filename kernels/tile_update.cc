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
// before an update finds its piece in the first-level cache, and so does the hash behind it. Longer pieces would leave
// that cache, shorter ones pay more for starting and ending XXH3's stream.
constexpr std::size_t kGroup = kHashedTileUnit, kPiece = kUpdatePiece;
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
  HashedArray(const ExtentHashes& extent, const void* array, std::uint64_t first, std::uint64_t element_bytes)
      : begin(static_cast<const std::byte*>(array) + first * element_bytes),
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

bool update_group(const TileUpdate& update, std::size_t first) {
  const OptimizerTile& tile = update.tile;
  std::array<std::optional<HashedArray>, 6> arrays;
  auto add = [&, count = 0u](const ExtentHashes& extent, const void* array, std::uint64_t bytes) mutable {
    if (array != nullptr) arrays[count++].emplace(extent, array, first, bytes);
  };
  add(update.weights, tile.weight, size_of(tile.type));
  add(update.states, tile.exp_avg, 4);
  add(update.states, tile.exp_avg_sq, 4);
  add(update.states, tile.residual, 2);
  add(update.states, tile.master, 4);
  if (!update.gradient.before.empty()) add(update.gradient, tile.gradient, size_of(tile.type));
  bool finite = true;
  for (std::size_t at = 0; at < kGroup; at += kPiece) {
    for (auto& array : arrays)
      if (array) array->before.add(array->piece(at)), array->ask(at + kPiece);
    finite &= update_elements(update, first + at, first + at + kPiece, optimizer_update_piece);
    for (auto& array : arrays)
      if (array) array->after.add(array->piece(at)), array->ask(at + 2 * kPiece);
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
  const bool hashed = !update.weights.before.empty() || !update.weights.after.empty() ||
                      !update.states.before.empty() || !update.states.after.empty() || !update.gradient.before.empty();
  const std::size_t count = update.tile.count;
  if (hashed && count % kGroup == 0) {
    SPILLWAY_CHECK(update.weights.bytes.size() == count * size_of(update.tile.type),
                   "a tile of whole groups has no end");
    return in_chunks(count, kGroup, workers,
                     [&](std::size_t first, std::size_t) { return update_group(update, first); });
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
