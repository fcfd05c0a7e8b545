#include "spillway/io_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "aio/io_engine.h"
#include "spillway/error.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// What kIoEngines names, in its order.
struct Rung {
  IoEngineKind kind;
  std::unique_ptr<IoEngine> (*make)(const IoEngineOptions&);
  const char* price;
};
constexpr Rung kLadder[] = {
    {IoEngineKind::kIoUring, make_uring_engine, ""},
    {IoEngineKind::kLibaio, make_libaio_engine, "about 50 % more CPU"},
    {IoEngineKind::kThreads, make_threads_engine, "about 450 % more CPU"},
};
static_assert(std::ranges::equal(kLadder, kIoEngines, {}, &Rung::kind));

void check_block(const IoQueueOptions& options, std::uint64_t unit) {
  if (options.block_bytes == 0 || options.block_bytes > kGiB || options.block_bytes % unit != 0) {
    throw Error(Code::kInvalidArgument, {"aio.block_size", fmt::format("is {}", options.block_bytes), 0,
                                         fmt::format("choose a multiple of {} up to 1 GiB", unit)});
  }
}

}  // namespace

std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const IoEngineOptions& options) {
  for (const Rung& rung : kLadder) {
    if (rung.kind == kind) return rung.make(options);
  }
  // The next rung only when the one above is not to be had, said once with its reason and price.
  std::string lost;
  for (const Rung& rung : kLadder) {
    try {
      auto engine = rung.make(options);
      if (!lost.empty()) log(LogLevel::kWarning, fmt::format("{}; using {}, {}", lost, name_of(rung.kind), rung.price));
      return engine;
    } catch (const Error& refusal) {
      if (refusal.code() != Code::kUnsupported || rung.kind == IoEngineKind::kThreads) throw;
      lost += fmt::format("{}{}: {}", lost.empty() ? "" : "; ", refusal.parts().object, refusal.parts().happened);
    }
  }
  return nullptr;  // not reached: the last rung returns or throws
}

const char* price_of(IoEngineKind kind) {
  for (const Rung& rung : kLadder) {
    if (rung.kind == kind) return rung.price;
  }
  return "";
}

void check_options(const IoQueueOptions& options, std::span<File* const> files) {
  SPILLWAY_CHECK(options.max_requests > 0, "a queue holds at least one request");
  SPILLWAY_CHECK(options.stall_report_seconds > 0, "a stall takes time");
  if (const auto none = std::ranges::find(files, nullptr); none != files.end()) {
    throw Error(Code::kInvalidArgument,
                {"files", fmt::format("file {} of {} is null", none - files.begin() + 1, files.size()), 0,
                 "open every file before the queue is made"});
  }
  if (options.depth == 0 || total_depth(options, files.size()) > kLargestDepth) {
    throw Error(Code::kInvalidArgument,
                {"aio.queue_depth",
                 fmt::format("is {} for each of {} files", options.depth, file_places(options, files.size())), 0,
                 fmt::format("choose 1 to {}", kLargestDepth / file_places(options, files.size()))});
  }
  SPILLWAY_CHECK(options.stripes == nullptr || options.stripes->files() == files.size(), "a share for every file");
  std::uint64_t unit = 1;
  for (const File* file : files) unit = std::max<std::uint64_t>(unit, file->alignment());
  check_block(options, unit);
}

void check_block(const IoQueueOptions& options, const File& file) { check_block(options, file.alignment()); }

std::unique_ptr<IoQueue> IoQueue::create(const IoQueueOptions& options, std::span<File* const> files,
                                         std::span<const std::span<std::byte>> regions) {
  check_options(options, files);
  return make_queue(options, files,
                    make_engine(options.engine, {.depth = total_depth(options, files.size()),
                                                 .block_bytes = options.block_bytes,
                                                 .files = files,
                                                 .regions = regions,
                                                 .max_files = file_places(options, files.size()),
                                                 .max_regions = options.max_regions}),
                    regions);
}

std::uint32_t file_places(const IoQueueOptions& options, std::size_t files) {
  const std::uint64_t places = std::max<std::uint64_t>({1, files, options.max_files});
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(places, kLargestDepth));
}

std::uint32_t total_depth(const IoQueueOptions& options, std::size_t files) {
  const std::uint64_t total = options.depth * std::max<std::uint64_t>({1, files, options.max_files});
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(total, UINT32_MAX));
}

AlignedRange aligned_range(const File& file, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t unit = file.alignment(), begin = align_down(offset, unit);
  return {.offset = begin,
          .bytes = align_up(offset + bytes, unit) - begin,
          .skip = offset - begin,
          .least_bytes = offset + bytes - begin};
}

std::string describe_transfer(IoOp op, const IoCompletion& completion) {
  if (op == IoOp::kSync) return "sync";
  return fmt::format("{} of {} bytes at offset {}", op == IoOp::kRead ? "read" : "write", completion.error_bytes,
                     completion.error_offset);
}

Error transfer_error(IoOp op, const File& file, const IoCompletion& completion, Hint hint) {
  return Error(Code::kIo, file.path().string(), describe_transfer(op, completion) + " failed", completion.error,
               std::move(hint));
}

}  // namespace spillway
