#include "kernels/checksum.h"

#include <xxhash.h>

namespace spillway {

std::uint64_t granule_checksum(std::span<const std::byte> granule) {
  return XXH3_64bits(granule.data(), granule.size());
}

std::uint64_t extent_checksum(std::span<const std::uint64_t> granule_checksums) {
  return XXH3_64bits(granule_checksums.data(), granule_checksums.size_bytes());
}

}  // namespace spillway
