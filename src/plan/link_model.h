// When a program of operations runs: every lane runs its operations in order, each as soon as what it waits for has
// ended, and lanes that share a link or the cores slow each other down. Pure; private to the schedule.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "src/plan/schedule.h"

namespace spillway {

// A part of the timeline, and what was done in it.
struct ModelWindow {
  double begin = 0, end = 0;
  std::array<double, kLinks> busy{};
  StallSeconds stalls;
  double shared = 0;
};

// Fills start and end of every operation. The window reaches from the end of operation `from` to the end of `to`.
//
// An operation's seconds are those it takes alone. The speed of a lane depends on which lanes run at the same time:
//  * cores: each lane needs so many of them; when all together need more than there are, each gets its share. On the
//    emulated device compute and the update both want all: both at once run at half their speed.
//  * NVMe: while reads and writes both run, each direction gets half of the mixed rate, at most its own. Both lanes of
//    reads share theirs equally.
ModelWindow run_link_model(std::span<ScheduleOp> ops, const MachineRates& rates, std::uint32_t from, std::uint32_t to);

}  // namespace spillway
