// What a step took, for its report: seconds, bytes by link, the slowest link, and where the compute stream's idle time
// went. It reads the counters that others keep (swap/stall_meter.h for idle time) and counts nothing itself. A step
// lasts from start(), or the report of the step before, to its own report.
#pragma once

#include <chrono>
#include <cstdint>

#include "spillway/engine.h"
#include "src/engine/run_resources.h"

namespace spillway {

class StepMeter {
 public:
  explicit StepMeter(RunResources& resources) : resources_(resources) {}

  void start();
  // The compute stream has run everything of the step, but the update where that is the device's.
  void computed();
  // Fills what this file is about; the step's number is there already.
  void report(StepReport& report);

 private:
  using Clock = std::chrono::steady_clock;
  struct Traffic {
    std::uint64_t nvme_read = 0, nvme_write = 0, h2d = 0, d2h = 0;
    Collectives network;
    TileMover::Hits tiles;
  };
  Traffic traffic() const;
  double idle_seconds() const { return resources_.stalls->idle_seconds(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  RunResources& resources_;
  Clock::time_point start_ = Clock::now();
  Traffic traffic_;  // this and the next two: as they were at the start
  double idle_ = 0, adam_ = 0;
  double compute_seconds_ = 0;
};

}  // namespace spillway
