// An I/O engine that misbehaves as drives and kernels do, on top of one that does not. What goes wrong comes from a
// script: written out in a test, or drawn from a seed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "aio/io_engine.h"

namespace spillway::testing {

// What happens to one piece on its way. The default: nothing.
struct Fault {
  int error = 0;            // not 0: the piece does not reach the engine below, this errno comes back
  std::uint64_t bytes = 0;  // not 0: only so many bytes are transferred
  std::int64_t moved = -1;  // not -1: the result that is reported instead of the true one
  std::uint32_t hold = 0;   // the result is held back for so many reaps
};

using FaultScript = std::function<Fault(const IoPiece&)>;

struct FaultRates {
  double short_transfer = 0, eintr = 0, eagain = 0, eio = 0, enospc = 0, delay = 0;
  bool syncs_too = false;
};

// `unit` is what a short transfer is a multiple of: a kernel never splits a sector of a direct transfer.
FaultScript seeded_faults(std::uint64_t seed, const FaultRates& rates, std::uint64_t unit);

// What went through, for the thread that owns the queue; `hold_all` for any thread.
struct EngineTrace {
  std::vector<IoPiece> started;
  std::uint64_t shorts = 0, errors = 0, delays = 0, fewer = 0;
  std::uint32_t in_flight = 0, most_in_flight = 0;
  std::atomic<bool> hold_all = false;  // no result comes back while it is set
};

struct FaultPlan {
  FaultScript script = {};       // empty: no faults
  std::uint64_t seed = 0;        // of takes_fewer and reorder
  double takes_fewer = 0;        // probability that a submit takes only some of the pieces, or none
  bool reorder = false;          // results come back in random order
  EngineTrace* trace = nullptr;  // must outlive the engine
};

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner, FaultPlan plan);

}  // namespace spillway::testing
