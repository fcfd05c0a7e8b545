// What the links of a machine carry, for the step line and for the schedule.
#pragma once

namespace spillway {

// What the machine does, as measured. A rate of 0: the run has no such link, or it takes no time.
struct MachineRates {
  unsigned cores = 1;
  // The emulated device: compute takes every core, a copy one of them. On a GPU neither takes any.
  bool device_on_cores = true;
  double nvme_read = 0, nvme_write = 0;  // bytes per second, each alone
  double nvme_mixed = 0;                 // both directions together, while both are busy
  double h2d = 0, d2h = 0;               // bytes per second
  double update_seconds = 0;             // of the optimizer per element, on every core, its checksums included
  double checksum = 0;                   // bytes per second of one core
  double sync_seconds = 0;               // of a commit: two syncs and the record between them
  // Of a rank, to and from all others: bytes per second each way, both at once, and what a collective takes besides.
  double network = 0, network_seconds = 0;
};

}  // namespace spillway
