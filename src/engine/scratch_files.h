// A caller's bytes that wait on the drives for a part of a step, in files without a name: what a PyTorch loop keeps
// between blocks. They are gone with the process, whatever ends it. The engine's own scratch area lies in the store and
// has nothing to do with these (swap/extents.h).
//
//   start(write) ─► the run's own kind of queue, on a thread of its own ─► wait(ticket)
//
// Threads: any, one call at a time. Errors: kIo, from start() where the drive is full, and from wait().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "spillway/config.h"
#include "spillway/io_file.h"
#include "spillway/io_queue.h"
#include "swap/store_thread.h"

namespace spillway {

class ScratchFiles {
 public:
  // What an address, an offset and a number of bytes are multiples of.
  static constexpr std::uint64_t kAlignment = 4096;

  // One in each of the configuration's nvme_paths.
  explicit ScratchFiles(const Config& config);
  ~ScratchFiles();  // waits for everything under way

  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(files_.size()); }
  IoStats stats() const { return thread_->stats(); }

  // `memory` stays as it is until wait() has returned. Disk space is reserved as a file grows.
  std::uint64_t start(IoOp op, std::uint32_t file, std::uint64_t offset, std::span<std::byte> memory);
  // For that one, once; throws what it failed with.
  void wait(std::uint64_t ticket);

 private:
  void reserve(std::uint32_t file, std::uint64_t bytes);

  std::vector<File> files_;
  std::vector<std::uint64_t> reserved_;  // bytes of each file
  std::unique_ptr<StoreThread> thread_;
  std::map<std::uint64_t, std::unique_ptr<IoBatch>> under_way_;  // by ticket; ends before the thread does
  std::uint64_t next_ticket_ = 1;
};

}  // namespace spillway
