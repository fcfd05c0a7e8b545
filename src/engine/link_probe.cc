#include "src/engine/link_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/devices.h"
#include "kernels/tile_update.h"
#include "spillway/units.h"
#include "swap/tile_arrays.h"

namespace spillway {
namespace {

constexpr std::uint64_t kCopyBytes = 32 * kMiB;
constexpr int kCopies = 4;  // of them one after another: 32 MiB take a GPU no longer than some calls do
constexpr std::uint64_t kGatheredBytes = 8 * kMiB;
constexpr int kSmallCalls = 4, kMostCalls = 16;  // of a few bytes each; of a piece of memory
constexpr std::uint64_t kRequestBytes = kMiB;
constexpr std::uint64_t kProbeElements = 8 * kHashedTileUnit;  // of the optimizer
constexpr double kMostDriveSeconds = 0.5;
constexpr double kGuessedDriveRate = 4e9;  // bytes per second: only says how long to look

double seconds_taken(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of three: the first one touches the pages.
double best_seconds(auto&& work) {
  double best = seconds_taken(work);
  for (int round = 0; round < 2; ++round) best = std::min(best, seconds_taken(work));
  return best;
}

double copy_rate(Device& device, Stream& stream, CopyKind kind, ProbeMemory memory) {
  const std::uint64_t bytes = std::min({kCopyBytes, memory.host.size(), memory.hbm.size()});
  // A plan without memory to copy to needs no rate of copies.
  if (bytes == 0) return 0;
  void* to = kind == CopyKind::kHostToDevice ? memory.hbm.data() : memory.host.data();
  const void* from = kind == CopyKind::kHostToDevice ? memory.host.data() : memory.hbm.data();
  return static_cast<double>(kCopies * bytes) / best_seconds([&] {
           for (int i = 0; i < kCopies; ++i) device.copy_async(kind, to, from, bytes, stream);
           stream.synchronize();
         });
}

// Of an element, its checksums included; 0 when there is no memory for a pass.
double update_seconds(HostWorkers& workers, std::span<std::byte> memory, const TileShape& like) {
  TileShape shape = like;
  shape.trainable = true;
  const auto bytes = [&shape] {
    return extent_bytes(shape, Part::kStates) + 2 * extent_bytes(shape, Part::kWeights);  // a gradient is like weights
  };
  for (shape.count = kProbeElements; bytes() > memory.size(); shape.count -= kHashedTileUnit) {
    if (shape.count == kHashedTileUnit) return 0;
  }
  const auto states = memory.first(extent_bytes(shape, Part::kStates));
  const auto weights = memory.subspan(states.size(), extent_bytes(shape, Part::kWeights));
  const TileMemory tile{.part = {weights.data(), states.data()}};
  std::vector<std::uint64_t> sums[4];
  const auto granules = [&](std::size_t i, std::size_t size) {
    sums[i].resize(div_up(std::uint64_t{size}, kGranuleBytes));
    return std::span(sums[i]);
  };
  const OptimizerScalars scalars = optimizer_scalars({.kind = shape.optimizer}, 1, 1);
  const GroupRange all{shape.count, 0};
  const TileUpdate update{
      .tile = tile_arrays(shape, tile, weights.data() + weights.size()),
      .groups = {&all, 1},
      .scalars = {&scalars, 1},
      .weights = {weights, granules(0, weights.size()), granules(1, weights.size()),
                  element_bytes(shape, Part::kWeights)},
      .states = {states, granules(2, states.size()), granules(3, states.size()), element_bytes(shape, Part::kStates)}};
  return best_seconds([&] { update_tile(update, workers); }) / static_cast<double>(shape.count);
}

// Requests of one kind go round the extents that they are given.
class Rounds {
 public:
  Rounds(IoOp op, std::vector<Extent> extents) : op_(op), extents_(std::move(extents)) {}

  void add(IoBatch& batch, std::byte* buffer) {
    const Extent& extent = extents_[next_];
    const std::uint64_t bytes = std::min(kRequestBytes, extent.bytes - at_);
    batch.add({.op = op_, .file = kStripedSpace, .offset = extent.offset + at_, .buffer = buffer, .bytes = bytes});
    moved_ += bytes;
    at_ += bytes;
    if (at_ < extent.bytes) return;
    at_ = 0;
    next_ = (next_ + 1) % extents_.size();
  }
  std::uint64_t moved() const { return moved_; }

 private:
  IoOp op_;
  std::vector<Extent> extents_;
  std::size_t next_ = 0;
  std::uint64_t at_ = 0, moved_ = 0;
};

// Two batches in turn, so that the drive always has one to work on.
double rate_of(StoreThread& thread, std::span<Rounds* const> rounds, std::span<std::byte> host, double seconds) {
  const std::size_t buffers = host.size() / kRequestBytes / 2;  // of a batch
  std::uint64_t before = 0, after = 0;
  for (const Rounds* round : rounds) before += round->moved();
  IoBatch batches[2] = {IoBatch(thread), IoBatch(thread)};
  const double taken = seconds_taken([&] {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t turn = 0;; ++turn) {
      IoBatch& batch = batches[turn % 2];
      batch.wait();
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= seconds && turn > 1) break;
      for (std::size_t i = 0; i < buffers; ++i) {
        rounds[i % rounds.size()]->add(batch, host.data() + (turn % 2 * buffers + i) * kRequestBytes);
      }
    }
    for (IoBatch& batch : batches) batch.wait();
  });
  for (const Rounds* round : rounds) after += round->moved();
  return static_cast<double>(after - before) / taken;
}

}  // namespace

MachineRates probe_machine(Device& device, HostWorkers& workers, Stream& h2d, Stream& d2h, ProbeMemory memory,
                           const TileShape& shape) {
  MachineRates rates;
  rates.cores = workers.threads();
  rates.device_on_cores = device_of(device.kind()).on_cpu;
  // Zeros: an update of garbage might meet NaN or subnormal numbers, which some processors compute slowly.
  std::memset(memory.host.data(), 0, memory.host.size());
  rates.h2d = copy_rate(device, h2d, CopyKind::kHostToDevice, memory);
  rates.d2h = copy_rate(device, d2h, CopyKind::kDeviceToHost, memory);
  rates.update_seconds = update_seconds(workers, memory.host, shape);
  const auto hashed = memory.host.first(std::min<std::size_t>(memory.host.size(), 4 * kMiB));
  // Or the compiler would leave the checksum out.
  volatile std::uint64_t sink = 0;
  rates.checksum = static_cast<double>(hashed.size()) / best_seconds([&] {
                     for (std::size_t at = 0; at < hashed.size(); at += kGranuleBytes) {
                       sink = granule_checksum(hashed.subspan(at, std::min(kGranuleBytes, hashed.size() - at)));
                     }
                   });
  return rates;
}

NetworkSeconds probe_network(Communicator& communicator, Stream& net, std::span<std::byte> memory) {
  constexpr std::int32_t kNoBlock = -1;
  const std::uint64_t ranks = communicator.ranks();
  // From when all have come.
  const auto seconds_of_calls = [&](std::uint64_t slice, int calls) {
    const std::vector<std::uint64_t> slices(ranks, slice);
    return best_seconds([&] {
      communicator.barrier(kNoBlock, net);
      for (int call = 0; call < calls; ++call) {
        communicator.all_gather(memory.first(ranks * slice), slices, kNoBlock, net);
      }
      net.synchronize();
    });
  };
  NetworkSeconds seconds;
  const std::uint64_t most = std::min<std::uint64_t>(kGatheredBytes, memory.size()) / ranks;
  const std::uint64_t slice = align_down(most, std::uint64_t{8});
  if (slice == 0) return seconds;
  seconds.of_a_call = seconds_of_calls(8, kSmallCalls) / (kSmallCalls + 1);  // with the barrier
  // A little memory is gathered several times. What takes no longer than the calls is not known.
  const auto calls = static_cast<int>(std::clamp<std::uint64_t>(kGatheredBytes / (ranks * slice), 1, kMostCalls));
  const double moving = seconds_of_calls(slice, calls) - (calls + 1) * seconds.of_a_call;
  seconds.of_a_byte = std::max(moving, 0.0) / static_cast<double>(calls * (ranks - 1) * slice);
  return seconds;
}

ProbedBytes probe_extents(StoreThread& thread, const ProbedExtents& extents, double seconds, std::span<std::byte> host,
                          MachineRates& rates) {
  if (host.size() < 4 * kRequestBytes || extents.read.empty() || extents.write.empty()) return {};
  Rounds reads(IoOp::kRead, extents.read), writes(IoOp::kWrite, extents.write);
  Rounds* const both[] = {&reads, &writes};
  rates.nvme_mixed = rate_of(thread, both, host, seconds);
  rates.nvme_read = rate_of(thread, std::span(both).first(1), host, seconds);
  rates.nvme_write = rate_of(thread, std::span(both).last(1), host, seconds);
  IoBatch batch(thread);
  // A commit syncs twice: the data, then its record.
  rates.sync_seconds = 2 * best_seconds([&] {
                         batch.add({.op = IoOp::kSync, .file = kStripedSpace});
                         batch.wait();
                       });
  return {.read = reads.moved(), .written = writes.moved()};
}

ProbedBytes probe_drive(StoreThread& thread, const TileStore& store, std::span<std::byte> host, MachineRates& rates) {
  ProbedExtents extents;
  std::uint64_t sum = 0;
  const auto tiles = static_cast<std::uint32_t>(store.layout().tiles.size());
  for (std::uint32_t t = 0; t < tiles; ++t) {
    for (std::size_t part = 0; part < kParts; ++part) {
      // Only committed slots are read; the other ones may hold the step that a rollback goes back to.
      const Extent from = store.readable(t).extent[part];
      if (from.bytes == 0) continue;
      extents.read.push_back(from);
      sum += from.bytes;
    }
  }
  const std::uint64_t scratch = store.layout().total_bytes - store.layout().scratch_offset;
  if (scratch > 0) extents.write.push_back({store.layout().scratch_offset, scratch});
  const double seconds = std::min(kMostDriveSeconds, static_cast<double>(sum) / kGuessedDriveRate / 20);
  return probe_extents(thread, extents, seconds, host, rates);
}

}  // namespace spillway
