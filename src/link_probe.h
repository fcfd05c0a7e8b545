// Measured rates of the links, for the step line: a step's limiting link is the one whose own time is longest.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/device.h"
#include "swap/store_thread.h"
#include "swap/tile_store.h"

namespace spillway {

struct LinkRates {  // bytes per second; 0: the run has no such link
  double nvme = 0;  // reads and writes mixed, together
  double h2d = 0, d2h = 0;
};

struct ProbeMemory {
  std::span<std::byte> host;  // registered; overwritten
  std::span<std::byte> hbm;   // overwritten
};

// Takes about a tenth of a second. NVMe is probed on the store's scratch area, with 1 MiB requests.
LinkRates probe_links(Device& device, Stream& h2d, Stream& d2h, ProbeMemory memory, StoreThread* thread,
                      TileStore* store, std::uint64_t scratch_bytes);

}  // namespace spillway
