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
  // With what may come later; never fewer than are given here.
  std::uint32_t max_files = 0, max_regions = 0;
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

  // A file that comes later or, null, goes. `index` is below max_files, and no piece of it is in flight. Throws
  // kUnsupported as the functions below do, kIo where the kernel takes no more.
  virtual void set_file(std::uint32_t index, const File* file) = 0;
  // A region that comes later and overlaps none that is there; true: the kernel has it, false: why not is logged.
  virtual bool add_region(std::span<std::byte> region) = 0;
  virtual void remove_region(std::span<std::byte> region) = 0;
};

// Each throws kUnsupported with the reason when this kernel, limit, sandbox or file does not allow it.
std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options);
std::unique_ptr<IoEngine> make_libaio_engine(const IoEngineOptions& options);
std::unique_ptr<IoEngine> make_threads_engine(const IoEngineOptions& options);

// The one of that kind; of kAuto the first of kIoEngines that is to be had, and why it is not an earlier one is logged.
std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const IoEngineOptions& options);

// What a rung of kAuto's ladder costs on top of the first, in words: `about 50 % more CPU`; empty for the first. CPU
// time per byte moved, bench/results/aio-engines.jsonl; the next line too.
const char* price_of(IoEngineKind kind);
inline constexpr int kPlainBuffersPrice = 75;  // of io_uring without registered buffers, in percent more CPU

// Files that a queue has places for, and pieces in flight of all of them, which is what its engine must take.
std::uint32_t file_places(const IoQueueOptions& options, std::size_t files);
std::uint32_t total_depth(const IoQueueOptions& options, std::size_t files);

// The queue over a given engine, which takes at most total_depth() pieces and has the files and the regions. `files` as
// in IoQueue::create.
std::unique_ptr<IoQueue> make_queue(const IoQueueOptions& options, std::span<File* const> files,
                                    std::unique_ptr<IoEngine> engine,
                                    std::span<const std::span<std::byte>> regions = {});

// Throws kInvalidArgument for a depth or a block size that cannot be; the second for what a file needs of the latter.
void check_options(const IoQueueOptions& options, std::span<File* const> files);
void check_block(const IoQueueOptions& options, const File& file);

}  // namespace spillway
