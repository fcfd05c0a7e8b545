// An asynchronous queue of reads, writes and syncs over a set of files, by io_uring, libaio or threads. It can be used
// without the rest of Spillway; tests/aio/queue_example.cc is a program that does.
//
//   submit(request) ──► waiting (per file, by priority)    ──► pieces ≤ block_bytes, ≤ depth in flight per file
//                                                                 └──► completions ──► wait()
//
// One thread, the one that created the queue, calls everything but wake(); a queue for several threads is in
// shared_io_queue.h. A request is split into pieces; short transfers are resumed at their offset, EINTR and EAGAIN are
// retried with a bound, every completion is read, and each request completes exactly once, on its own: there is no wait
// for all. Buffers belong to the caller and must stay alive until the completion. Nothing is allocated after creation,
// but by add_file() and add_region() and to write a log line, and no callback exists: completions are values returned
// by wait(). Errors of a transfer are values (IoCompletion::error); errors of the engine itself throw spillway::Error.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/error.h"
#include "spillway/io_file.h"
#include "spillway/stripe_map.h"

namespace spillway {

enum class IoOp : std::uint8_t { kRead, kWrite, kSync };

// kUrgent: compute waits for it. Urgent requests start before waiting normal ones, in the order of their submission.
// Reads and writes of normal priority are each first in, first out, and alternate, since a drive moves both ways at
// once.
enum class IoPriority : std::uint8_t { kUrgent, kNormal };

// IoRequest::file of a transfer or sync of the striped space that all files form together (IoQueueOptions::stripes).
inline constexpr std::uint32_t kStripedSpace = UINT32_MAX;

struct IoRequest {
  IoOp op = IoOp::kRead;
  IoPriority priority = IoPriority::kNormal;
  std::uint32_t file = 0;       // index into the files given at creation, or kStripedSpace
  std::uint64_t offset = 0;     // bytes; multiple of the file's alignment
  std::byte* buffer = nullptr;  // multiple of its memory_alignment; null for kSync
  std::uint64_t bytes = 0;      // multiple of the file's alignment; 0 for kSync
  std::uint64_t tag = 0;        // returned with the completion
  // Reads: the file may end anywhere after this many bytes; what the buffer then holds beyond the end of the file is
  // unspecified (a direct read delivers a file system's last block whole). 0: the file must hold all of `bytes`.
  std::uint64_t least_bytes = 0;
};

struct IoCompletion {
  std::uint64_t tag = 0;
  int error = 0;                   // errno value, 0 on success; ENODATA: the file ended inside a read
  std::uint32_t error_file = 0;    // where the failing piece lies; never kStripedSpace
  std::uint64_t error_offset = 0;  // in that file
  std::uint64_t error_bytes = 0;
};

enum class IoEngineKind : std::uint8_t { kAuto, kIoUring, kLibaio, kThreads };

// The engines, best first; kAuto takes the first of them that is to be had.
inline constexpr std::array kIoEngines = {IoEngineKind::kIoUring, IoEngineKind::kLibaio, IoEngineKind::kThreads};

// What spillway.io_engine calls them, in the order of IoEngineKind.
inline constexpr std::array<std::string_view, 4> kIoEngineNames = {"auto", "io_uring", "libaio", "threads"};
constexpr std::string_view name_of(IoEngineKind engine) { return kIoEngineNames[static_cast<std::size_t>(engine)]; }
inline constexpr auto kLastIoEngine = static_cast<IoEngineKind>(kIoEngineNames.size() - 1);

// Of all files of a queue together: far below what a ring can hold (32768) and far above what any drive needs.
inline constexpr std::uint32_t kLargestDepth = 4096;

struct IoQueueOptions {
  IoEngineKind engine = IoEngineKind::kAuto;  // kAuto: io_uring, else libaio, else threads; every rung lost is logged
  std::uint64_t block_bytes = 1 << 20;        // largest piece
  std::uint32_t depth = 32;                   // pieces in flight per file
  std::uint32_t max_requests = 4096;          // submitted and not yet returned by wait(); more is a programmer error
  double stall_report_seconds = 30;           // a piece without progress for this long is logged while it waits
  const StripeMap* stripes = nullptr;         // over the files given at creation, in their order; copied. Null: none
  // Files and regions at a time, those given at creation included, so that there are places for what is added later; 0:
  // those alone. Each file has its depth of what the engine holds, and each place of a later region 4 GiB of what
  // io_uring registers.
  std::uint32_t max_files = 0, max_regions = 0;
};

struct IoStats {
  std::uint64_t read_bytes = 0, write_bytes = 0, syncs = 0;
  double busy_seconds = 0;  // time with at least one transfer in flight
};

// For IoQueue::wait(): also with nothing pending, until another thread or a signal handler calls wake().
inline constexpr double kUntilWoken = -std::numeric_limits<double>::infinity();

class IoQueue {
 public:
  // `regions` are the arenas that buffers come from; they are registered with the kernel when it allows (buffers
  // outside them work too, unregistered). Files must outlive the queue; a null one is refused (kInvalidArgument).
  static std::unique_ptr<IoQueue> create(const IoQueueOptions& options, std::span<File* const> files,
                                         std::span<const std::span<std::byte>> regions);

  virtual ~IoQueue() = default;

  virtual void submit(const IoRequest& request) = 0;

  // Starts what may start and returns completions, at most out.size(). Waits up to timeout_seconds (negative: as long
  // as something is pending, for ever) until there is at least one, or until wake(). Returns the filled part of `out`,
  // possibly empty.
  virtual std::span<IoCompletion> wait(std::span<IoCompletion> out, double timeout_seconds) = 0;

  // Makes the current or next wait() return early. Any thread; async-signal-safe.
  virtual void wake() noexcept = 0;

  // Ends the requests of which a part has not started: none of it will, and what is in flight goes on. Each completes
  // with ECANCELED, naming what was not begun.
  virtual void cancel_waiting() = 0;

  // A file that comes later; returns its index. It outlives the queue or goes before with remove_file(), whose index
  // the next one takes. Throws kInvalidArgument where there is no place or block_bytes is no multiple of its alignment,
  // kUnsupported where the engine cannot take it (libaio without direct I/O), kBusy where requests are under way on the
  // file that goes, kInvalidArgument where the index names none, or one of the striped space.
  virtual std::uint32_t add_file(File& file) = 0;
  virtual void remove_file(std::uint32_t index) = 0;

  // A region that comes later; true when the kernel has it registered, else transfers of it work at the price that is
  // logged once (libaio and threads register none). It stays mapped until it is removed, by its first byte, and nothing
  // of it is in flight; or until the queue is destroyed. Throws kInvalidArgument for one that is empty, that overlaps
  // another, for which there is no place, or which is none.
  virtual bool add_region(std::span<std::byte> region) = 0;
  virtual void remove_region(const std::byte* begin) = 0;

  // Requests submitted and not yet returned.
  virtual std::uint32_t pending() const noexcept = 0;
  virtual IoStats stats() const noexcept = 0;
  // `io_uring, registered buffers` and the like: what was granted.
  virtual std::string describe() const = 0;
};

// `read of 1048576 bytes at offset 4096`, from a completion's error_offset and error_bytes.
std::string describe_transfer(IoOp op, const IoCompletion& completion);
// `PATH: read of 1048576 bytes at offset 4096 failed (Input/output error); HINT`, of the kind kIo; `file` is the one
// that completion.error_file names.
Error transfer_error(IoOp op, const File& file, const IoCompletion& completion, Hint hint);

// The smallest aligned range of `file` that holds [offset, offset + bytes): what a direct read of a tensor at any
// offset asks for. Read `bytes` into aligned memory, with least_bytes; what was wanted starts at `skip`.
struct AlignedRange {
  std::uint64_t offset = 0, bytes = 0;  // of the request
  std::uint64_t skip = 0;               // from the start of its buffer
  std::uint64_t least_bytes = 0;  // IoRequest::least_bytes: the padding after them may lie past the end of the file
};
AlignedRange aligned_range(const File& file, std::uint64_t offset, std::uint64_t bytes);

}  // namespace spillway
