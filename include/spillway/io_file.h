// One open file for direct I/O: opening, alignment, preallocation, lock. Transfers go through an IoQueue; the blocking
// calls here are for small headers and for tests.
//
// A File belongs to whoever opened it and must outlive every queue that has it. Thread: any, one at a time; transfers
// and sync() several at a time, also beside a queue's thread.
// Errors: spillway::Error with the path as object.
#pragma once

#include "spillway/cplusplus.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace spillway {

struct FileOptions {
  bool writable = false;
  bool create = false;        // O_CREAT | O_EXCL with mode 0600
  bool follow_links = false;  // a symbolic link as the last part of the path is followed, else refused
  bool direct = true;         // ask for O_DIRECT; direct() says whether the file system granted it
};

class File {
 public:
  static File open(const std::filesystem::path& path, FileOptions options);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const noexcept { return fd_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  bool direct() const noexcept { return direct_; }
  // What offset and length of a request, and its address in memory, must be multiples of (statx STATX_DIOALIGN, else a
  // probe); 1 when the file is not direct. Some drives ask for far less of the address than of the others.
  std::uint32_t alignment() const noexcept { return alignment_; }
  std::uint32_t memory_alignment() const noexcept { return memory_alignment_; }
  std::uint64_t size_bytes() const;

  // Reserves [0, bytes) on disk so that no later write inside it can fail with ENOSPC; copy-on-write is switched off
  // first where the file system has it. Throws kIo with ENOSPC, naming what is missing, and leaves the size unchanged.
  void preallocate(std::uint64_t bytes);
  // The same, but where the file system cannot reserve it writes nothing and returns false.
  bool reserve(std::uint64_t bytes);

  // Exclusive lock on this very description (F_OFD_SETLK); after a kill -9 the kernel may still be finishing writes of
  // the dead holder, so it retries for `patience_seconds` before it throws kBusy.
  void lock(double patience_seconds);
  // A lock that any number of readers share; false, at once, when a process holds the exclusive one.
  bool lock_shared();
  // Whether the path still names this very file: another process may have removed or replaced it.
  bool at_its_path() const;

  // Renames the open file and makes the new name durable (fsync of the directory).
  void rename_to(const std::filesystem::path& path);

  // Blocking, complete transfers (short ones are resumed); offset, length and address must be aligned if direct().
  // The file may end after `least_bytes` of a read; what `out` then holds beyond its end is unspecified.
  void read_at(std::uint64_t offset, std::span<std::byte> out, std::uint64_t least_bytes = UINT64_MAX) const;
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  // fdatasync. A failure is final: the file refuses to sync again (the kernel may have dropped the dirty pages).
  void sync();

  // The errno of the sync that failed, here or in a queue; 0: none did. Whoever syncs this file records a failure here.
  int sync_error() const noexcept { return sync_error_; }
  void note_sync_failure(int errno_value) noexcept;

 private:
  File() = default;
  int fd_ = -1;
  bool direct_ = false;
  std::atomic<int> sync_error_ = 0;
  std::uint32_t alignment_ = 1, memory_alignment_ = 1;
  std::filesystem::path path_;
};

}  // namespace spillway
