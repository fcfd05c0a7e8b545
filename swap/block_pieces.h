// A block's pieces on their way, which fetcher and spiller share: which is started next, and the checksums of those
// that pass in chunks of whole granules, each in any order. It only sums; what a sum must be is known to the fetcher or
// the spiller. Nothing is allocated after reserve().
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/checksum.h"

namespace spillway {

// Starts pieces in their order, from `next` on: one that is resident in host memory at once, by `copy_resident`; of the
// others a chunk at a time, by `start_chunk`, which returns false when no chunk is free and moves `next` past a piece
// with its last chunk. So chunks go over the borders of pieces, and the link always has a queue to work on. Returns
// whether all are started.
template <typename Piece, typename CopyResident, typename StartChunk>
bool start_pieces(const std::vector<Piece>& pieces, std::size_t& next, CopyResident copy_resident,
                  StartChunk start_chunk) {
  while (next < pieces.size()) {
    if (!pieces[next].resident) {
      if (!start_chunk()) return false;
    } else {
      copy_resident(pieces[next]);
      ++next;
    }
  }
  return true;
}

class PieceSums {
 public:
  void reserve(std::size_t pieces, std::size_t granules) {
    granules_.reserve(granules);
    open_.reserve(pieces);
  }

  // Pieces that are resident in host memory pass in no chunks.
  template <typename Piece>
  void begin(const std::vector<Piece>& pieces) {
    open_.clear();
    std::uint32_t granules = 0;
    for (const Piece& piece : pieces) {
      const auto count = piece.resident ? 0u : static_cast<std::uint32_t>(div_up(piece.extent.bytes, kGranuleBytes));
      open_.push_back({.first = granules, .count = count, .left = count});
      granules += count;
    }
    granules_.resize(granules);
  }

  // Bytes of the piece from `offset` on. Returns the checksum of its extent with the last of them.
  std::optional<std::uint64_t> add(std::size_t piece, std::uint64_t offset, std::span<const std::byte> bytes) {
    Open& open = open_[piece];
    const std::span<std::uint64_t> all = std::span(granules_).subspan(open.first, open.count);
    const auto count = static_cast<std::uint32_t>(div_up(bytes.size(), kGranuleBytes));
    granule_checksums(bytes, all.subspan(offset / kGranuleBytes, count));
    open.left -= count;
    return open.left > 0 ? std::nullopt : std::optional(extent_checksum(all));
  }

 private:
  struct Open {
    std::uint32_t first = 0, count = 0, left = 0;  // granules
  };
  std::vector<std::uint64_t> granules_;
  std::vector<Open> open_;
};

}  // namespace spillway
