#include "src/link_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kCopyBytes = 32 * kMiB;
constexpr std::uint64_t kRequestBytes = kMiB;

double seconds_of(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double copy_rate(Device& device, Stream& stream, CopyKind kind, ProbeMemory memory) {
  const std::uint64_t bytes = std::min({kCopyBytes, memory.host.size(), memory.hbm.size()});
  if (bytes == 0) return 0;
  void* to = kind == CopyKind::kHostToDevice ? memory.hbm.data() : memory.host.data();
  const void* from = kind == CopyKind::kHostToDevice ? memory.host.data() : memory.hbm.data();
  double best = 0;
  for (int round = 0; round < 3; ++round) {  // the first one touches the pages
    const double seconds = seconds_of([&] {
      device.copy_async(kind, to, from, bytes, stream);
      stream.synchronize();
    });
    best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  return best;
}

// The lower half of the area is read, the upper half written, at once.
double nvme_rate(StoreThread& thread, const TileStore& store, std::span<std::byte> host, std::uint64_t scratch_bytes) {
  // The area that this store was made with: a run that resumes it may have planned a larger one.
  const std::uint64_t area = std::min(scratch_bytes, store.layout().total_bytes - store.layout().scratch_offset);
  const std::uint64_t half = align_down(std::min<std::uint64_t>(area, host.size()) / 2, kExtentAlignment);
  if (half == 0) return 0;
  double best = 0;
  for (int round = 0; round < 3; ++round) {  // the first one writes blocks that the drive has never seen
    IoBatch batch(thread);
    const double seconds = seconds_of([&] {
      for (std::uint64_t at = 0; at < half; at += kRequestBytes) {
        const std::uint64_t bytes = std::min(kRequestBytes, half - at);
        const std::uint64_t base = store.layout().scratch_offset;
        batch.add({.op = IoOp::kRead,
                   .file = kStripedSpace,
                   .offset = base + at,
                   .buffer = host.data() + at,
                   .bytes = bytes});
        batch.add({.op = IoOp::kWrite,
                   .file = kStripedSpace,
                   .offset = base + half + at,
                   .buffer = host.data() + half + at,
                   .bytes = bytes});
      }
      batch.wait();
    });
    best = std::max(best, 2.0 * static_cast<double>(half) / seconds);
  }
  return best;
}

}  // namespace

LinkRates probe_links(Device& device, Stream& h2d, Stream& d2h, ProbeMemory memory, StoreThread* thread,
                      TileStore* store, std::uint64_t scratch_bytes) {
  LinkRates rates;
  std::memset(memory.host.data(), 0, memory.host.size());
  rates.h2d = copy_rate(device, h2d, CopyKind::kHostToDevice, memory);
  rates.d2h = copy_rate(device, d2h, CopyKind::kDeviceToHost, memory);
  if (store) rates.nvme = nvme_rate(*thread, *store, memory.host, scratch_bytes);
  return rates;
}

}  // namespace spillway
