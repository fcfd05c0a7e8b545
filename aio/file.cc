#include "spillway/io_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "aio/direct_io.h"
#include "aio/directory.h"
#include "spillway/error.h"
#include "spillway/log.h"

namespace spillway {
namespace {

[[noreturn]] void throw_open_error(const std::filesystem::path& path, const FileOptions& options, int error) {
  ErrorParts parts{path.string(), options.create ? "cannot be created" : "cannot be opened", error, ""};
  switch (error) {
    case EEXIST: parts.hint = "remove it or choose another path"; throw Error(Code::kExists, std::move(parts));
    case ENOENT:
      parts.hint = options.create ? "create its directory first" : "check the path";
      throw Error(Code::kNotFound, std::move(parts));
    case ELOOP:
      parts.hint = "it is a symbolic link, which is not followed here; name the file that it leads to";
      throw Error(Code::kInvalidArgument, std::move(parts));
    case EACCES:
    case EPERM:
    case EROFS: parts.hint = "choose a path that this user may write, or change its permissions"; break;
    case EISDIR:
    case ENOTDIR: parts.hint = "a store is one file in a directory; move away what is in its place"; break;
    case ENOSPC:
    case EDQUOT: parts.hint = "free some space, or choose another path"; break;
    case EMFILE:
    case ENFILE: parts.hint = "raise ulimit -n"; break;
    default: parts.hint = "check the drive; the kernel's log may say more"; break;
  }
  throw Error(Code::kIo, std::move(parts));
}

bool aligned(std::uint64_t offset, const void* address, std::size_t bytes, const File& file) {
  return (offset | bytes) % file.alignment() == 0 &&
         reinterpret_cast<std::uintptr_t>(address) % file.memory_alignment() == 0;
}

// Moves all of `bytes` by repeating transfer(address, bytes, offset), a pread or pwrite; `stopped_with` is the errno
// value for one that moves nothing. The file may end once `least` bytes are moved.
template <class Byte, class Transfer>
void transfer_all(const File& file, const char* verb, int stopped_with, std::uint64_t offset, std::span<Byte> bytes,
                  std::size_t least, Transfer transfer) {
  SPILLWAY_CHECK(aligned(offset, bytes.data(), bytes.size(), file),
                 "offset and length of a direct transfer must be multiples of File::alignment(), its address of "
                 "File::memory_alignment()");
  while (!bytes.empty()) {
    const ssize_t moved = transfer(bytes.data(), bytes.size(), offset);
    if (moved < 0 && errno == EINTR) continue;
    // Direct I/O goes on from an aligned place: a transfer that stopped inside a sector is repeated from its start.
    // Less than a sector moved means that the file ends there.
    const std::size_t done = moved < 0 ? 0 : static_cast<std::size_t>(moved) / file.alignment() * file.alignment();
    if (done == 0 && moved >= 0 && static_cast<std::size_t>(moved) >= least) return;
    if (done == 0) {
      const int error = moved < 0 ? errno : stopped_with;
      throw Error(Code::kIo, {file.path().string(),
                              fmt::format("{} of {} bytes at offset {} failed", verb, bytes.size(), offset), error,
                              error == ENODATA ? "the file is shorter than it should be"
                                               : "check the drive; the kernel's log may say more"});
    }
    bytes = bytes.subspan(done);
    offset += done;
    least -= std::min(least, done);
  }
}

}  // namespace

File File::open(const std::filesystem::path& path, FileOptions options) {
  SPILLWAY_CHECK(options.writable || !options.create, "a file is created to be written");
  // O_NONBLOCK: to open a pipe to read it is to wait for a writer. It is taken back, for io_uring heeds it.
  const int flags = (options.follow_links ? 0 : O_NOFOLLOW) | O_CLOEXEC | O_NOCTTY |
                    (options.writable ? O_RDWR : O_RDONLY | O_NONBLOCK) | (options.create ? O_CREAT | O_EXCL : 0);
  File file;
  do {
    file.fd_ = ::open(path.c_str(), flags, 0600);
  } while (file.fd_ < 0 && errno == EINTR);
  if (file.fd_ < 0) throw_open_error(path, options, errno);
  file.path_ = path;

  struct stat status;
  if (::fstat(file.fd_, &status) != 0) throw_open_error(path, options, errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(Code::kInvalidArgument, {path.string(), "is not a regular file", 0, "name a file"});
  }
  if (!options.writable && ::fcntl(file.fd_, F_SETFL, flags & ~O_NONBLOCK) != 0) throw_open_error(path, options, errno);
  if (options.direct) {
    const DirectIo direct = enable_direct_io(file.fd_, options.writable);
    file.direct_ = direct.granted;
    file.alignment_ = direct.alignment;
    file.memory_alignment_ = direct.memory_alignment;
    if (!direct.granted) {
      log(LogLevel::kWarning,
          fmt::format("{}: the file system does not grant direct I/O ({}); transfers go through the page cache, which "
                      "costs a copy and memory outside the budgets",
                      path.string(), std::generic_category().message(direct.refused_with)));
    }
  }
  return file;
}

File::File(File&& other) noexcept { *this = std::move(other); }

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(direct_, other.direct_);
  sync_error_ = other.sync_error_.exchange(sync_error_);
  std::swap(alignment_, other.alignment_);
  std::swap(memory_alignment_, other.memory_alignment_);
  std::swap(path_, other.path_);
  return *this;
}

namespace {

// An open-file-description lock, not a process one: the latter would vanish when any other descriptor of this file is
// closed anywhere in the process. Returns the errno value, 0 on success.
int try_lock(int fd, short type) {
  struct flock whole {};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  int result = 0;
  do {
    result = ::fcntl(fd, F_OFD_SETLK, &whole);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

}  // namespace

// A forked process may have the file open still, which would keep a lock that is not taken back.
File::~File() {
  if (fd_ < 0) return;
  try_lock(fd_, F_UNLCK);
  ::close(fd_);
}

std::uint64_t File::size_bytes() const {
  struct stat status;
  if (::fstat(fd_, &status) != 0)
    throw Error(Code::kIo, {path_.string(), "its size cannot be read", errno, "check the drive"});
  return static_cast<std::uint64_t>(status.st_size);
}

void File::lock(double patience_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(std::max(0.0, patience_seconds)));
  constexpr std::chrono::milliseconds kLongest{200};
  bool said = false;  // of what takes long
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kLongest)) {
    const int error = try_lock(fd_, F_WRLCK);
    if (error == 0) return;
    if (error != EAGAIN && error != EACCES) {
      throw Error(Code::kIo, {path_.string(), "cannot be locked", error,
                              "the file system must support locks and the file must be open for writing"});
    }
    if (Clock::now() >= deadline) {
      throw Error(Code::kBusy, {path_.string(), "is in use by another engine or process", 0,
                                "wait for it to end, or choose another path"});
    }
    if (pause == kLongest && !std::exchange(said, true)) {
      log(LogLevel::kInfo, fmt::format("{} is in use by another engine or process; waiting {:.0f} s at most for its "
                                       "end",
                                       path_.string(), patience_seconds));
    }
    std::this_thread::sleep_for(pause);
  }
}

bool File::lock_shared() {
  const int error = try_lock(fd_, F_RDLCK);
  if (error == 0) return true;
  if (error == EAGAIN || error == EACCES) return false;
  throw Error(Code::kIo, {path_.string(), "cannot be locked", error, "the file system must support locks"});
}

bool File::at_its_path() const {
  struct stat mine, named;
  return ::fstat(fd_, &mine) == 0 && ::lstat(path_.c_str(), &named) == 0 && mine.st_dev == named.st_dev &&
         mine.st_ino == named.st_ino;
}

void File::read_at(std::uint64_t offset, std::span<std::byte> out, std::uint64_t least_bytes) const {
  const std::size_t least = std::min<std::uint64_t>(least_bytes, out.size());
  transfer_all(*this, "read", ENODATA, offset, out, least, [this](std::byte* to, std::size_t bytes, std::uint64_t at) {
    return ::pread(fd_, to, bytes, static_cast<off_t>(at));
  });
}

void File::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  transfer_all(*this, "write", EIO, offset, bytes, bytes.size() + 1,
               [this](const std::byte* from, std::size_t count, std::uint64_t at) {
                 return ::pwrite(fd_, from, count, static_cast<off_t>(at));
               });
}

void File::sync() {
  if (sync_error_ == 0 && ::fdatasync(fd_) == 0) return;
  const bool repeated = sync_error_ != 0;
  note_sync_failure(errno);
  throw Error(Code::kIo, {path_.string(), repeated ? "an earlier sync failed" : "sync failed", sync_error_,
                          "what was written since the last good sync may be lost; check the drive, then reopen"});
}

void File::note_sync_failure(int errno_value) noexcept {
  int none = 0;
  sync_error_.compare_exchange_strong(none, errno_value != 0 ? errno_value : EIO);
}

void File::rename_to(const std::filesystem::path& path) {
  if (path != path_ && ::rename(path_.c_str(), path.c_str()) != 0) {
    throw Error(Code::kIo,
                {path_.string(), "cannot be renamed to " + path.string(), errno, "check the directory's permissions"});
  }
  path_ = path;
  // The name is durable only when its directory is.
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  if (const int error = sync_names(parent).error)
    throw Error(Code::kIo, {parent.string(), "cannot be synced", error,
                            error == EMFILE || error == ENFILE ? "raise ulimit -n" : "check the drive"});
}

}  // namespace spillway
