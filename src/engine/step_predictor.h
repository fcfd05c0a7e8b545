// Predicts the seconds of a step from the plan, the machine's measured rates and what each visit takes to compute: the
// shortest that it took in any step so far, since others share the cores. It runs the plan's schedule
// (src/plan/schedule.h) on a virtual clock and has no rules of its own.
//
// The engine's thread. Nothing is allocated but by forget().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/device.h"
#include "src/plan/machine_rates.h"
#include "src/plan/plan.h"
#include "src/plan/schedule.h"

namespace spillway {

// Makes `input`, which is the plan's, that of a step that updates so many of its speculative blocks inside backward.
void speculate(ScheduleInput& input, const Plan& plan, std::uint32_t blocks);
// How many of them make the step shortest; at most `tries` counts are tried beside 0, evenly spaced. Leaves `input`
// with the last one tried.
std::uint32_t best_speculation(ScheduleInput& input, const Plan& plan, std::uint32_t tries);

class StepPredictor {
 public:
  // `leases`: numbers that begin_visit() may get are below it.
  StepPredictor(Device& device, std::size_t visits, std::size_t leases);

  // Of a visit of the plan; nothing for another.
  void begin_visit(std::uint32_t lease, std::optional<std::size_t> visit, Stream& stream);
  void end_visit(std::uint32_t lease);
  // Looks what visits took, those that are over.
  void end_step();
  // The plan has other visits now.
  void forget(std::size_t visits);

  // What the plan does not say of a step.
  struct Step {
    unsigned nodes = 1;    // of the machine
    bool commits = false;  // it is one of those that are made durable
  };
  // Nothing while a visit was never seen. `speculative` blocks are updated inside backward.
  std::optional<double> step_seconds(const Plan& plan, std::span<const Visit> visits, const MachineRates& rates,
                                     Step step, std::uint32_t speculative) const;
  // How many of the plan's speculative blocks make the step shortest. More of them move reads and writes from the next
  // forward pass, which needs them before it can go on, into backward, but cost a read of their new weights.
  std::optional<std::uint32_t> best_speculation(const Plan& plan, std::span<const Visit> visits,
                                                const MachineRates& rates, Step step) const;

 private:
  struct Watched {
    std::unique_ptr<Stopwatch> watch;
    std::optional<double> best_seconds;
    Stream* stream = nullptr;  // while it lasts
    Watched* outer = nullptr;  // that the lease began before
  };
  struct Lease {
    Watched* watched = nullptr;   // the one that began last
    std::uint32_t unplanned = 0;  // visits that began since, and are not watched
  };
  std::optional<ScheduleInput> input(const Plan& plan, std::span<const Visit> visits, const MachineRates& rates,
                                     Step step) const;

  Device& device_;
  std::vector<Watched> visits_;
  std::vector<Lease> leases_;
};

}  // namespace spillway
