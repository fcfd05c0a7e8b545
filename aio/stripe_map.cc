#include "spillway/stripe_map.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint32_t kMostShare = 255;

}  // namespace

StripeMap::StripeMap(std::span<const std::uint32_t> shares, std::uint64_t unit_bytes, std::uint64_t header_bytes)
    : shares_(shares.begin(), shares.end()), unit_bytes_(unit_bytes), header_bytes_(header_bytes) {
  const bool fine = std::all_of(shares.begin(), shares.end(), [](auto s) { return s > 0 && s <= kMostShare; });
  if (shares.empty() || !fine || unit_bytes == 0) {
    throw Error(Code::kInvalidArgument, {"stripe shares", "are not one number per file from 1 to 255", 0,
                                         "give every file a share, or leave it out"});
  }
  // Each unit goes to the file that is furthest behind its share of the units so far: file i's k-th unit is due at
  // (k + 1/2) / share.
  const std::uint32_t units = std::accumulate(shares.begin(), shares.end(), 0u);
  std::vector<std::uint32_t> placed(shares.size(), 0);
  for (std::uint32_t u = 0; u < units; ++u) {
    std::uint32_t best = 0;
    const auto due = [&](std::uint32_t f) { return (placed[f] + 0.5) / shares[f]; };
    for (std::uint32_t f = 1; f < shares.size(); ++f) {
      if (due(f) < due(best)) best = f;
    }
    row_.push_back(best);
    before_.push_back(placed[best]++);
  }
}

std::uint32_t StripeMap::file_of(std::uint64_t space_offset) const noexcept {
  return row_[(space_offset - header_bytes_) / unit_bytes_ % row_.size()];
}

StripeMap::Extent StripeMap::next_on(std::uint32_t file, std::uint64_t space_offset) const noexcept {
  if (shares_.size() == 1) {
    return {space_offset, space_offset, std::numeric_limits<std::uint64_t>::max() - space_offset};
  }
  std::uint64_t unit = (space_offset - header_bytes_) / unit_bytes_;
  std::uint64_t inside = (space_offset - header_bytes_) % unit_bytes_;
  for (; row_[unit % row_.size()] != file; ++unit) inside = 0;
  const std::uint64_t row = unit / row_.size(), column = unit % row_.size();
  const std::uint64_t file_unit = row * shares_[file] + before_[column];
  return {header_bytes_ + unit * unit_bytes_ + inside, header_bytes_ + file_unit * unit_bytes_ + inside,
          unit_bytes_ - inside};
}

std::uint64_t StripeMap::file_bytes(std::uint32_t file, std::uint64_t space_bytes) const noexcept {
  if (shares_.size() == 1) return space_bytes;
  const std::uint64_t units = div_up(space_bytes - std::min(space_bytes, header_bytes_), unit_bytes_);
  const std::uint64_t in_last_row = units % row_.size();
  const auto extra = static_cast<std::uint64_t>(
      std::count(row_.begin(), row_.begin() + static_cast<std::ptrdiff_t>(in_last_row), file));
  return header_bytes_ + (units / row_.size() * shares_[file] + extra) * unit_bytes_;
}

std::vector<std::uint32_t> stripe_shares(std::span<const double> rates, std::span<const std::uint64_t> room_bytes,
                                         std::uint64_t space_bytes, std::uint32_t row_units) {
  SPILLWAY_CHECK(rates.size() == room_bytes.size() && !rates.empty(), "a rate and a room for every file");
  SPILLWAY_CHECK(row_units > 0 && row_units <= kMostShare, "a share fits its row");
  const std::size_t files = rates.size();
  std::vector<std::uint32_t> most(files), shares(files, 0);
  for (std::size_t f = 0; f < files; ++f) {
    // In whole numbers: a drive with room for exactly its share has room for it.
    const std::uint64_t space = std::max<std::uint64_t>(1, space_bytes);
    most[f] = static_cast<std::uint32_t>(std::min(room_bytes[f], space) * row_units / space);
  }
  // Unit by unit to the drive that would be done with one more the earliest, as long as it has room.
  for (std::uint32_t given = 0; given < row_units; ++given) {
    std::size_t best = files;
    const auto done_at = [&](std::size_t f) { return (shares[f] + 1) / rates[f]; };
    for (std::size_t f = 0; f < files; ++f) {
      if (shares[f] < most[f] && (best == files || done_at(f) < done_at(best))) best = f;
    }
    if (best == files) return {};
    ++shares[best];
  }
  // The same proportions in the shortest row.
  std::uint32_t common = 0;
  for (const std::uint32_t share : shares) common = std::gcd(common, share);
  for (std::uint32_t& share : shares) share /= common;
  return shares;
}

}  // namespace spillway
