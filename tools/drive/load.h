// One measured point: a steady stream of requests against one file or several, and what came of it.
//
//   outstanding    ┌───────────────────────────────── always `requests` per file ──────────────────────┐
//   ──────────────►│ warm-up, not counted │ window: completions are counted, CPU time is taken │ drain │
//
// The window begins and ends with a completion, so that a slow drive's few large requests are not counted as a fraction
// more or less, and it is stretched until it holds as many completions as there are requests outstanding. With no
// warm-up everything counts, from the first submission to the last completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "spillway/io_queue.h"

namespace spillway::drive {

inline constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

struct LoadSpec {
  IoEngineKind engine = IoEngineKind::kAuto;
  bool fixed_buffers = true;                      // offer the memory to the kernel for registration
  std::uint64_t block_bytes = 1 << 20;            // of a request, so that its latency is the drive's service time
  std::uint32_t depth = 32;                       // requests outstanding per file
  std::uint32_t read_parts = 1, write_parts = 0;  // of the bytes moved; with both, reads keep to the lower half
  double warmup_seconds = 0;
  double seconds = std::numeric_limits<double>::infinity();            // the window's length
  std::uint64_t most_bytes = kNoLimit, most_written_bytes = kNoLimit;  // submitted in all, warm-up and drain included
  // Null: each file on its own, in order, from the start again after the end. Otherwise the files are walked as the
  // space that they form, each from its `begin` on, up to space_bytes, and none runs far ahead of the others.
  const StripeMap* stripes = nullptr;
  std::uint64_t space_bytes = 0;
  // Called at least ten times a second with the time since the first submission and the bytes completed since then;
  // false ends the load early.
  std::function<bool(double seconds, std::uint64_t bytes)> go_on = {};
  // Of a load that others beside it are measured with, in other processes. `begin` is called when all is ready, before
  // the first submission. While `hold` says true, the requests go on after the window, uncounted, so that nobody's
  // window has the drive to itself; a limit of bytes ends them all the same. It is asked after each wait for some.
  std::function<void()> begin = {};
  std::function<bool()> hold = {};
};

struct LoadFile {
  File* file = nullptr;
  std::uint64_t bytes = 0;  // up to there the file may be read and overwritten
  std::uint64_t begin = 0;  // from there on
};

struct LoadResult {
  double seconds = 0, cpu_seconds = 0;  // of the window; CPU of the whole process
  std::uint64_t read_bytes = 0, written_bytes = 0;
  std::vector<float> latencies_us;   // of the window's requests
  std::uint64_t moved_in_all = 0;    // warm-up and drain included
  std::uint64_t written_in_all = 0;  // warm-up and drain included
  bool fixed_buffers = false;        // whether the kernel registered the memory
  bool ended_early = false;          // go_on said so
  std::string engine;                // what the queue says of itself

  double rate() const { return seconds > 0 ? static_cast<double>(read_bytes + written_bytes) / seconds : 0; }
  double cpu_seconds_per_gib() const;
  double latency_us(double share) const;  // 0.5: the median; 0 when nothing was measured
};

// Memory for a load: page-aligned, huge pages where there are any, touched, and filled with random bytes that nothing
// below can shorten.
class LoadMemory {
 public:
  explicit LoadMemory(std::uint64_t bytes);
  ~LoadMemory();
  LoadMemory(const LoadMemory&) = delete;
  LoadMemory& operator=(const LoadMemory&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

// `memory` holds a request for each that is outstanding. Throws Error: kUnsupported when the engine is not to be had,
// kIo when a transfer fails.
LoadResult run_load(std::span<const LoadFile> files, std::span<std::byte> memory, const LoadSpec& spec);

double process_cpu_seconds();
double median(std::vector<double> values);  // of repeats; 0 of none

}  // namespace spillway::drive
