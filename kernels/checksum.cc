#include "kernels/checksum.h"

#define XXH_STATIC_LINKING_ONLY  // the size of a state
// The library's plain functions use SSE2 (12 GB/s a thread here); these choose AVX2 or AVX-512 at run time (37 GB/s).
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <new>

namespace spillway {

static_assert(sizeof(XXH3_state_t) <= GranuleHasher::kStateBytes && alignof(XXH3_state_t) <= 64);

std::uint64_t granule_checksum(std::span<const std::byte> granule) {
  return XXH3_64bits(granule.data(), granule.size());
}

namespace {

std::uint64_t checksum_of(std::span<const std::byte> extent, std::size_t granule) {
  const std::uint64_t at = granule * kGranuleBytes;
  return granule_checksum(extent.subspan(at, std::min(kGranuleBytes, extent.size() - at)));
}

}  // namespace

void granule_checksums(std::span<const std::byte> extent, std::span<std::uint64_t> out) {
  for (std::size_t g = 0; g < out.size(); ++g) out[g] = checksum_of(extent, g);
}

void granule_checksums(std::span<const std::byte> extent, std::span<std::uint64_t> out, HostWorkers& workers) {
  workers.parallel_for(out.size(), [=](std::size_t g) { out[g] = checksum_of(extent, g); });
}

std::uint64_t extent_checksum(std::span<const std::uint64_t> granule_checksums) {
  return XXH3_64bits(granule_checksums.data(), granule_checksums.size_bytes());
}

GranuleHasher::GranuleHasher(std::uint64_t* out) : out_(out) {
  if (out_) XXH3_64bits_reset(new (state_) XXH3_state_t);
}

void GranuleHasher::add(std::span<const std::byte> bytes) {
  auto* const state = std::launder(reinterpret_cast<XXH3_state_t*>(state_));
  while (out_ && !bytes.empty()) {
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), kGranuleBytes - filled_));
    XXH3_64bits_update(state, part.data(), part.size());
    bytes = bytes.subspan(part.size());
    filled_ += part.size();
    if (filled_ < kGranuleBytes) continue;
    *out_++ = XXH3_64bits_digest(state);
    XXH3_64bits_reset(state);
    filled_ = 0;
  }
}

RunningChecksum::RunningChecksum() { XXH3_64bits_reset(new (state_) XXH3_state_t); }

void RunningChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(std::launder(reinterpret_cast<XXH3_state_t*>(state_)), bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::value() const {
  return XXH3_64bits_digest(std::launder(reinterpret_cast<const XXH3_state_t*>(state_)));
}

void RunningChecksum::restart() { XXH3_64bits_reset(std::launder(reinterpret_cast<XXH3_state_t*>(state_))); }

}  // namespace spillway
