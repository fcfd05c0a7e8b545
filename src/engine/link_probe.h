// Measures what the links carry: a step's limiting link is the one whose own time is longest. What a step should take
// at these rates is computed by step_predictor.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/device.h"
#include "spillway/communicator.h"
#include "spillway/device.h"
#include "src/plan/machine_rates.h"
#include "swap/store_thread.h"
#include "swap/tile_store.h"

namespace spillway {

struct ProbeMemory {
  std::span<std::byte> host;  // registered; overwritten
  std::span<std::byte> hbm;   // overwritten
};

// Copies, the optimizer's pass over `shape` and checksums; a tenth of a second or less.
MachineRates probe_machine(Device& device, HostWorkers& workers, Stream& h2d, Stream& d2h, ProbeMemory memory,
                           const TileShape& shape);

// What collectives move a byte in, of what other ranks have, and what a call takes besides. Of `memory` a few MiB are
// overwritten, as many on all ranks, which call this together; 0 a byte where there is no memory.
struct NetworkSeconds {
  double of_a_byte = 0, of_a_call = 0;
};
NetworkSeconds probe_network(Communicator& communicator, Stream& net, std::span<std::byte> memory);

struct ProbedBytes {
  std::uint64_t read = 0, written = 0;
};

// Reads, writes and both at once, with requests of 1 MiB, for so many seconds each. Extents of the store's striped
// space, none of them empty; what is to be written is overwritten. Fills nvme_* and sync_seconds of `rates`; returns
// what it moved, which depends on how fast the drive was.
struct ProbedExtents {
  std::vector<Extent> read, write;
};
ProbedBytes probe_extents(StoreThread& thread, const ProbedExtents& extents, double seconds, std::span<std::byte> host,
                          MachineRates& rates);

// The same in a store: what is committed is read, and the scratch area written. Not the other slots: they hold the step
// before, which a rollback goes back to when the committed one turns out to be damaged. Takes about as long as the
// store's own bytes take in a twentieth of a step, and half a second each at most.
ProbedBytes probe_drive(StoreThread& thread, const TileStore& store, std::span<std::byte> host, MachineRates& rates);

}  // namespace spillway
