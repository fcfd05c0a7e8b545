// Checksum of an extent: the XXH3 of the XXH3s of its 256 KiB granules, so that it can be computed and checked chunk by
// chunk, in any order and on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spillway/units.h"

namespace spillway {

inline constexpr std::uint64_t kGranuleBytes = 256 * kKiB;

std::uint64_t granule_checksum(std::span<const std::byte> granule);
std::uint64_t extent_checksum(std::span<const std::uint64_t> granule_checksums);

}  // namespace spillway
