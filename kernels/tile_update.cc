#include "kernels/tile_update.h"

#include <algorithm>
#include <atomic>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// A worker takes a group of elements, whose arrays fill whole granules, and goes through it piece by piece. A piece is
// as long as Adam asks for lines ahead (adam.cc), 14 KiB of five arrays: the hash of the next piece finds it in the
// first-level cache, as the hash behind Adam finds this one.
constexpr std::size_t kGroup = 128 * kKiB, kPiece = 1024;
constexpr std::size_t kUnhashedChunk = 16 * kKiB;  // elements that a worker takes when nothing is hashed beside

// One array of the tile, hashed before and after its update.
struct HashedArray {
  // `offset`: of the array in its extent; `first`: of the group in the array. Both in bytes, multiples of the granule.
  HashedArray(const ExtentHashes& extent, std::uint64_t offset, std::uint64_t first, std::uint64_t element_bytes)
      : begin(extent.bytes.data() + offset + first),
        element(element_bytes),
        before(extent.before.empty() ? nullptr : &extent.before[(offset + first) / kGranuleBytes]),
        after(extent.after.empty() ? nullptr : &extent.after[(offset + first) / kGranuleBytes]) {}

  std::span<const std::byte> piece(std::size_t at) const { return {begin + at * element, kPiece * element}; }

  const std::byte* begin;
  std::uint64_t element;
  GranuleHasher before, after;
};

bool update_group(const TileUpdate& update, const AdamScalars& scalars, std::size_t first) {
  const AdamTile& tile = update.tile;
  const std::uint64_t count = tile.count, weight = size_of(tile.type);
  HashedArray arrays[] = {{update.weights, 0, first * weight, weight},
                          {update.states, 0, first * 4, 4},
                          {update.states, count * 4, first * 4, 4},
                          {update.states, tile.residual ? count * 8 : 0, tile.residual ? first * 2 : 0, 2}};
  const auto used = std::span(arrays).first(tile.residual ? 4 : 3);
  bool finite = true;
  for (std::size_t at = 0; at < kGroup; at += kPiece) {
    for (HashedArray& array : used) array.before.add(array.piece(at));
    finite &= adam_update(tile, scalars, first + at, first + at + kPiece);
    for (HashedArray& array : used) array.after.add(array.piece(at));
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

bool update_tile(const TileUpdate& update, const AdamScalars& scalars, HostWorkers& workers) {
  const bool hashed = !update.weights.before.empty() || !update.weights.after.empty() ||
                      !update.states.before.empty() || !update.states.after.empty();
  const std::size_t count = update.tile.count;
  if (hashed && count % kGroup == 0) {
    SPILLWAY_CHECK(update.weights.bytes.size() == count * size_of(update.tile.type),
                   "a tile of whole groups has no end");
    return in_chunks(count, kGroup, workers,
                     [&](std::size_t first, std::size_t) { return update_group(update, scalars, first); });
  }
  // The granules of a tile's uneven end hold several arrays, or parts of two groups: three passes.
  for (const ExtentHashes& extent : {update.weights, update.states}) {
    granule_checksums(extent.bytes, extent.before, workers);
  }
  const bool finite = in_chunks(count, kUnhashedChunk, workers, [&](std::size_t begin, std::size_t end) {
    return adam_update(update.tile, scalars, begin, end);
  });
  for (const ExtentHashes& extent : {update.weights, update.states}) {
    granule_checksums(extent.bytes, extent.after, workers);
  }
  return finite;
}

}  // namespace spillway
