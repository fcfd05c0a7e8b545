// An I/O engine that misbehaves as drives and kernels do, on top of one that does not. What goes wrong comes from a
// script: written out in a test, or drawn from a seed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "aio/io_engine.h"

namespace spillway::testing {

// What happens to one piece on its way. The default: nothing.
struct Fault {
  int error = 0;             // not 0: the piece does not reach the engine below, this errno comes back
  std::uint64_t bytes = 0;   // not 0: only so many bytes are transferred
  std::int64_t moved = -1;   // not -1: the result that is reported instead of the true one
  std::uint32_t hold = 0;    // the result is held back for so many reaps
  double delay_seconds = 0;  // and for so long: a slow drive
  // A bit of the piece, counted from its start, is wrong in what a read delivers or a write stores. What the caller
  // wrote from stays as it is.
  std::optional<std::uint64_t> flipped_bit = {};
  // A torn write: of each 64 sectors only those whose bit is set are stored. Then `error` comes back, or success, when
  // that is 0: a drive that lies.
  std::optional<std::uint64_t> stored_sectors = {};
};

using FaultScript = std::function<Fault(const IoPiece&)>;

struct FaultRates {
  double short_transfer = 0, eintr = 0, eagain = 0, eio = 0, enospc = 0, delay = 0;
  double flip = 0, torn = 0;
  double lie = 0;  // of the torn writes
  bool syncs_too = false;
};

// `unit` is what a short transfer is a multiple of: a kernel never splits a sector of a direct transfer.
FaultScript seeded_faults(std::uint64_t seed, const FaultRates& rates, std::uint64_t unit);

// What a file's pieces hold of the engine.
struct Load {
  std::uint32_t pieces = 0, most_pieces = 0;
  std::uint64_t bytes = 0, most_bytes = 0;
};

// Byte `offset` of file `file`.
struct ByteAt {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  auto operator<=>(const ByteAt&) const = default;
};

// What went through, for the thread that owns the queue; `hold_all` for any thread.
struct EngineTrace {
  std::vector<IoPiece> started;
  std::uint64_t shorts = 0, errors = 0, delays = 0, fewer = 0, flips = 0, torn = 0, lies = 0;
  std::uint32_t in_flight = 0, most_in_flight = 0;
  std::map<std::uint32_t, Load> loads;  // by file

  // What is wrong although nobody said so: the bits flipped in a byte, in memory after a read and on the drive after a
  // write, and the sectors that a lying drive did not store, by their first byte. A later transfer of the same bytes
  // takes its entries away, and so may the test.
  std::map<ByteAt, std::uint8_t> flipped;
  std::map<ByteAt, std::uint64_t> unstored;  // to their length

  std::function<bool(const IoPiece&)> hold_if = {};  // no result of these pieces comes back
  std::atomic<bool> hold_all = false;                // no result at all
};

struct FaultPlan {
  FaultScript script = {};       // empty: no faults
  std::uint64_t seed = 0;        // of takes_fewer and reorder
  double takes_fewer = 0;        // probability that a submit takes only some of the pieces, or none
  bool reorder = false;          // results come back in random order
  EngineTrace* trace = nullptr;  // must outlive the engine
  // As the engine below has them; needed for torn writes alone.
  std::vector<File*> files = {};
};

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner, FaultPlan plan);

}  // namespace spillway::testing
