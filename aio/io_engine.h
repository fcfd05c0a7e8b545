// How pieces reach the kernel: the seam below the queue. An engine starts system calls and hands back their raw
// results; it knows nothing of requests, retries or priorities. io_uring, libaio and threads implement it, tests wrap
// it with faults.
//
// One thread, the one that created the engine, calls everything but wake(). An engine is destroyed when nothing is in
// flight. Errors of a transfer are results (-errno); an engine that cannot go on throws spillway::Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "spillway/io_queue.h"
#include "spillway/units.h"

namespace spillway {

// One system call's worth of work; at most 1 GiB.
struct IoPiece {
  IoOp op = IoOp::kRead;
  std::uint32_t file = 0;
  std::uint32_t slot = 0;  // names the piece while it is in flight; comes back with its result
  std::uint64_t offset = 0;
  std::byte* buffer = nullptr;
  std::uint64_t bytes = 0;
};

struct IoResult {
  std::uint32_t slot = 0;
  std::int64_t moved = 0;  // bytes transferred, or -errno
};

struct Reaped {
  std::size_t count = 0;  // results filled in
  bool woken = false;     // wake() was called since the last reap that said so
};

struct IoEngineOptions {
  std::uint32_t depth = 0;           // pieces in flight, at most
  std::uint64_t block_bytes = kMiB;  // largest piece
  std::span<File* const> files = {};
  std::span<const std::span<std::byte>> regions = {};
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  // Takes a prefix of `pieces`, possibly none of them, and returns its length.
  virtual std::size_t submit(std::span<const IoPiece> pieces) = 0;
  // Fills `out` with results. Waits up to timeout_seconds (negative: for ever) for the first result or for wake().
  // May return early with nothing.
  virtual Reaped reap(std::span<IoResult> out, double timeout_seconds) = 0;
  // Any thread, any signal handler.
  virtual void wake() noexcept = 0;
  virtual std::string describe() const = 0;
};

// Each throws kUnsupported with the reason when this kernel, limit, sandbox or file does not allow it.
std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options);
std::unique_ptr<IoEngine> make_libaio_engine(const IoEngineOptions& options);
std::unique_ptr<IoEngine> make_threads_engine(const IoEngineOptions& options);

// What a rung of kAuto's ladder costs on top of the first, in words: `about 50 % more CPU`; empty for the first. CPU
// time per byte moved, bench/results/aio-engines.jsonl; the next line too.
const char* price_of(IoEngineKind kind);
inline constexpr int kPlainBuffersPrice = 75;  // of io_uring without registered buffers, in percent more CPU

// Pieces in flight of a whole queue, which is what its engine must take.
std::uint32_t total_depth(const IoQueueOptions& options, std::size_t files);

// The queue over a given engine, which takes at most total_depth() pieces. `files` as in IoQueue::create.
std::unique_ptr<IoQueue> make_queue(const IoQueueOptions& options, std::span<File* const> files,
                                    std::unique_ptr<IoEngine> engine);

// Throws kInvalidArgument for a depth or a block size that cannot be.
void check_options(const IoQueueOptions& options, std::span<File* const> files);

}  // namespace spillway
