#include "spillway/rate_probe.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kLargestHalf = 32 * kMiB;  // one half is read while the other is written
constexpr std::uint64_t kSmallestHalf = kMiB;
constexpr int kRounds = 3;

void await_all(IoQueue& queue, const File& file, std::size_t count) {
  IoCompletion done[16];
  while (count > 0) {
    for (const IoCompletion& completion : queue.wait(done, -1)) {
      --count;
      if (completion.error == 0) continue;
      throw Error(Code::kIo, {file.path().parent_path().string(), "a transfer of the bandwidth probe failed",
                              completion.error, "check the drive"});
    }
  }
}

// Takes space for two halves, as large as the drive has room for; returns the bytes of one.
std::uint64_t reserve(File& file) {
  for (std::uint64_t half = kLargestHalf;; half /= 2) {
    try {
      file.preallocate(2 * half);
      return half;
    } catch (const Error& failure) {
      if (failure.parts().errno_value != ENOSPC || half == kSmallestHalf) throw;
    }
  }
}

}  // namespace

double probe_rate(const std::filesystem::path& directory, const IoQueueOptions& options) {
  const auto path = directory / (".spillway-probe-" + std::to_string(::getpid()));
  File file = File::open(path, {.writable = true, .create = true});
  ::unlink(path.c_str());
  const std::uint64_t half = reserve(file);
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(64 * kKiB, 2 * half)), &std::free);
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0x5a, 2 * half);

  IoQueueOptions own{.engine = options.engine, .block_bytes = options.block_bytes, .depth = options.depth};
  File* const files[] = {&file};
  const std::span<std::byte> regions[] = {{memory.get(), 2 * half}};
  const auto queue = IoQueue::create(own, files, regions);
  const std::uint64_t request = std::min(half, align_up(options.block_bytes, 64 * kKiB));
  const auto move_both = [&](IoOp first, IoOp second) {
    std::size_t count = 0;
    for (std::uint64_t at = 0; at < half; at += request, count += 2) {
      const std::uint64_t bytes = std::min(request, half - at);
      queue->submit({.op = first, .offset = at, .buffer = memory.get() + at, .bytes = bytes});
      queue->submit({.op = second, .offset = half + at, .buffer = memory.get() + half + at, .bytes = bytes});
    }
    await_all(*queue, file, count);
  };
  // Not timed: what was never written is read without the drive, and written slower than what it has seen.
  move_both(IoOp::kWrite, IoOp::kWrite);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    move_both(IoOp::kRead, IoOp::kWrite);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * static_cast<double>(half) / seconds);
  }
  return best;
}

}  // namespace spillway
