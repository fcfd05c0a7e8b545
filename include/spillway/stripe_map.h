// One address space over several files, so that every large transfer keeps all drives busy, each with the share it can
// carry. Pure arithmetic.
//
//   shares {2, 1}:   space  | header | 0 | 1 | 2 | 3 | 4 | 5 | …     one row: 3 units of unit_bytes,
//                    file 0 | header | 0 | 2 | 3 | 5 | …              interleaved, so that a transfer of a few units
//                    file 1 | header | 1 | 4 | …                      finds both files at work
//
// Every file keeps its first header_bytes for itself, and the space's offsets start at header_bytes, too: so with one
// file the space is the file.
#pragma once

#include "spillway/cplusplus.h"

#include <cstdint>
#include <span>
#include <vector>

namespace spillway {

// How a store of several paths is striped, and what the sweep measures: units of 1 MiB, rows of 64, so that a share is
// exact to 1.6 %.
inline constexpr std::uint64_t kStripeUnitBytes = 1 << 20;
inline constexpr std::uint32_t kStripeRowUnits = 64;

class StripeMap {
 public:
  // shares[i]: units per row on file i, 1 to 255; unit_bytes and header_bytes: multiples of every file's alignment.
  // Throws kInvalidArgument when there are no files, or a share is out of range.
  StripeMap(std::span<const std::uint32_t> shares, std::uint64_t unit_bytes, std::uint64_t header_bytes);

  struct Extent {
    std::uint64_t space_offset = 0;  // where the run starts in the space
    std::uint64_t file_offset = 0;   // and in the file
    std::uint64_t bytes = 0;         // contiguous in both from there on
  };

  std::uint32_t files() const noexcept { return static_cast<std::uint32_t>(shares_.size()); }
  std::span<const std::uint32_t> shares() const noexcept { return shares_; }
  std::uint64_t unit_bytes() const noexcept { return unit_bytes_; }
  std::uint64_t header_bytes() const noexcept { return header_bytes_; }

  // Offsets of the space below are at least header_bytes.
  // The file that holds a byte of the space.
  std::uint32_t file_of(std::uint64_t space_offset) const noexcept;
  // The first run on `file` at or after `space_offset`.
  Extent next_on(std::uint32_t file, std::uint64_t space_offset) const noexcept;
  // Size of the file when the space ends at `space_bytes`; both count the header.
  std::uint64_t file_bytes(std::uint32_t file, std::uint64_t space_bytes) const noexcept;

 private:
  std::vector<std::uint32_t> shares_;
  std::uint64_t unit_bytes_, header_bytes_;
  std::vector<std::uint32_t> row_;     // file of every unit of a row
  std::vector<std::uint32_t> before_;  // units of the same file that stand before it in the row
};

// Shares of a row of `row_units` units (at most 255) for drives of these rates (any unit, all above 0), where file i
// can take at most room_bytes[i] of a space of `space_bytes`. A drive too full for its share gets what fits, the others
// the rest; a share of 0: too slow or too full for a single unit. Empty when the space does not fit. Headers are not
// counted, and the space is taken as whole rows: the units of a last row that is cut may all lie on one drive.
std::vector<std::uint32_t> stripe_shares(std::span<const double> rates, std::span<const std::uint64_t> room_bytes,
                                         std::uint64_t space_bytes, std::uint32_t row_units);

}  // namespace spillway
