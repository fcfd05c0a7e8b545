#include "aio/queue.h"

#include <fmt/format.h>

#include "aio/io_engine.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// Far below what a ring can hold (32768) and far above what any drive needs.
constexpr std::uint32_t kLargestDepth = 4096;

std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const IoEngineOptions& options) {
  switch (kind) {
    case IoEngineKind::kIoUring: return make_uring_engine(options);
    case IoEngineKind::kThreads: return make_threads_engine(options);
    case IoEngineKind::kAuto: break;
  }
  // The ladder: the next rung only when the one above is not to be had, said once.
  try {
    return make_uring_engine(options);
  } catch (const Error& refusal) {
    if (refusal.code() != Code::kUnsupported) throw;
    log(LogLevel::kWarning,
        fmt::format("{}: {}; using threads, which cost more CPU", refusal.parts().object, refusal.parts().happened));
  }
  return make_threads_engine(options);
}

}  // namespace

void check_options(const IoQueueOptions& options, std::span<File* const> files) {
  SPILLWAY_CHECK(options.max_requests > 0, "a queue holds at least one request");
  if (options.depth == 0 || options.depth > kLargestDepth) {
    throw Error(Code::kInvalidArgument, {"aio.queue_depth", fmt::format("is {}", options.depth), 0,
                                         fmt::format("choose 1 to {}", kLargestDepth)});
  }
  std::uint64_t unit = 1;
  for (const File* file : files) unit = std::max<std::uint64_t>(unit, file->alignment());
  if (options.block_bytes == 0 || options.block_bytes > kGiB || options.block_bytes % unit != 0) {
    throw Error(Code::kInvalidArgument, {"aio.block_size", fmt::format("is {}", options.block_bytes), 0,
                                         fmt::format("choose a multiple of {} up to 1 GiB", unit)});
  }
}

std::unique_ptr<IoQueue> IoQueue::create(const IoQueueOptions& options, std::span<File* const> files,
                                         std::span<const std::span<std::byte>> regions) {
  check_options(options, files);
  return make_queue(options, files,
                    make_engine(options.engine, {.depth = options.depth, .files = files, .regions = regions}));
}

std::string describe_transfer(IoOp op, const IoCompletion& completion) {
  if (op == IoOp::kSync) return "sync";
  return fmt::format("{} of {} bytes at offset {}", op == IoOp::kRead ? "read" : "write", completion.error_bytes,
                     completion.error_offset);
}

std::string describe_failure(IoOp op, const File& file, const IoCompletion& completion) {
  return fmt::format("{}: {} failed", file.path().string(), describe_transfer(op, completion));
}

}  // namespace spillway
