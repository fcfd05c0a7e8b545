// Checksum of an extent: the XXH3 of the XXH3s of its 256 KiB granules, so that it can be computed and checked chunk by
// chunk, in any order and on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spillway/device.h"
#include "spillway/units.h"

namespace spillway {

inline constexpr std::uint64_t kGranuleBytes = 256 * kKiB;

std::uint64_t granule_checksum(std::span<const std::byte> granule);
// The checksums of all granules of an extent, here or on the workers; one place in `out` for each.
void granule_checksums(std::span<const std::byte> extent, std::span<std::uint64_t> out);
void granule_checksums(std::span<const std::byte> extent, std::span<std::uint64_t> out, HostWorkers& workers);
std::uint64_t extent_checksum(std::span<const std::uint64_t> granule_checksums);

// The same, of bytes that come in order and in parts: what passes through the cache for another reason.
class GranuleHasher {
 public:
  // Checksums of whole granules go to out[0], out[1], …; null: nothing is done.
  explicit GranuleHasher(std::uint64_t* out);
  GranuleHasher(const GranuleHasher&) = delete;
  GranuleHasher& operator=(const GranuleHasher&) = delete;

  void add(std::span<const std::byte> bytes);

  static constexpr std::size_t kStateBytes = 1024;

 private:
  alignas(64) std::byte state_[kStateBytes];
  std::uint64_t* out_;
  std::uint64_t filled_ = 0;  // bytes of the granule that is open
};

// The XXH3 of bytes that come in order and in parts, without granules.
class RunningChecksum {
 public:
  RunningChecksum();
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;
  void restart();

 private:
  alignas(64) std::byte state_[GranuleHasher::kStateBytes];
};

}  // namespace spillway
