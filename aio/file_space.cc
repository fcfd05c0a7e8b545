// File::preallocate and File::reserve: takes the disk space of a file before the first byte is needed.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include "spillway/error.h"
#include "spillway/io_file.h"
#include "spillway/log.h"
#include "spillway/units.h"

namespace spillway {
namespace {

// Nothing where the file system does not count its space (ramfs).
std::optional<std::uint64_t> free_bytes(int fd) noexcept {
  struct statvfs space;
  if (::fstatvfs(fd, &space) != 0 || space.f_blocks == 0) return std::nullopt;
  return std::uint64_t{space.f_bavail} * space.f_frsize;
}

// Blocks that are rewritten in place cannot run out of space; copy-on-write would allocate new ones at every write.
// The flag only takes on an empty file, and most file systems have no such flag and need none.
void switch_off_copy_on_write(const File& file) {
  int flags = 0;
  if (::ioctl(file.fd(), FS_IOC_GETFLAGS, &flags) == 0) {
    flags |= FS_NOCOW_FL;
    if (::ioctl(file.fd(), FS_IOC_SETFLAGS, &flags) == 0) return;
  }
  struct statfs system;
  if (::fstatfs(file.fd(), &system) == 0 && static_cast<std::uint32_t>(system.f_type) == BTRFS_SUPER_MAGIC) {
    log(LogLevel::kWarning,
        fmt::format("{}: copy-on-write could not be switched off ({}); a full disk can still fail a "
                    "later write",
                    file.path().string(), std::generic_category().message(errno)));
  }
}

// Appends zeros up to `bytes`; what the file holds already counts as written. Returns the errno value, 0 on success.
int append_zeros(const File& file, std::uint64_t size, std::uint64_t bytes) {
  constexpr std::uint64_t kChunk = kMiB;
  const std::uint64_t unit = std::max<std::uint64_t>(file.memory_alignment(), 4096);
  const std::unique_ptr<void, decltype(&std::free)> zeros(std::aligned_alloc(unit, kChunk), &std::free);
  if (!zeros) throw std::bad_alloc();
  std::fill_n(static_cast<std::byte*>(zeros.get()), kChunk, std::byte{0});
  // A direct write must be aligned, so an odd end is rounded up and cut off afterwards.
  for (std::uint64_t offset = align_up<std::uint64_t>(size, file.alignment()); offset < bytes;) {
    const std::uint64_t want = std::min(kChunk, align_up<std::uint64_t>(bytes - offset, file.alignment()));
    const ssize_t written = ::pwrite(file.fd(), zeros.get(), want, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    // Cut inside a sector: the disk is full; the next round asks again from the sector's start and gets the errno.
    offset += align_down<std::uint64_t>(static_cast<std::uint64_t>(written), file.alignment());
    if (static_cast<std::uint64_t>(written) < file.alignment()) return ENOSPC;
  }
  return ::ftruncate(file.fd(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

struct Range {
  std::uint64_t offset = 0, bytes = 0;
};

// What of the first `bytes` of a file has no blocks yet. What is reserved and not written has some, which SEEK_DATA
// does not tell. Nothing where the file system does not say.
std::optional<std::vector<Range>> holes_in(int fd, std::uint64_t bytes) {
  constexpr std::uint32_t kExtents = 256;
  std::vector<std::uint64_t> memory((sizeof(fiemap) + kExtents * sizeof(fiemap_extent)) / sizeof(std::uint64_t) + 1);
  auto* const map = reinterpret_cast<fiemap*>(memory.data());
  std::vector<Range> holes;
  std::uint64_t at = 0;
  for (bool last = false; at < bytes && !last;) {
    std::ranges::fill(memory, 0);
    map->fm_start = at;
    map->fm_length = bytes - at;
    map->fm_flags = FIEMAP_FLAG_SYNC;
    map->fm_extent_count = kExtents;
    if (::ioctl(fd, FS_IOC_FIEMAP, map) != 0) return std::nullopt;
    last = map->fm_mapped_extents == 0;
    for (const fiemap_extent& extent : std::span(map->fm_extents, map->fm_mapped_extents)) {
      if (extent.fe_logical > at) holes.push_back({at, std::min<std::uint64_t>(extent.fe_logical, bytes) - at});
      at = std::max<std::uint64_t>(at, extent.fe_logical + extent.fe_length);
      last |= (extent.fe_flags & FIEMAP_EXTENT_LAST) != 0;
    }
  }
  if (at < bytes) holes.push_back({at, bytes - at});
  return holes;
}

struct Room {
  std::uint64_t missing = 0;
  std::optional<std::uint64_t> available;
};

Room room_for(const File& file, std::uint64_t bytes) {
  if (const auto holes = holes_in(file.fd(), bytes)) {
    Room room{0, free_bytes(file.fd())};
    for (const Range& hole : *holes) room.missing += hole.bytes;
    return room;
  }
  struct stat status;
  const std::uint64_t held = ::fstat(file.fd(), &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
  return {bytes > held ? bytes - held : 0, free_bytes(file.fd())};
}

[[noreturn]] void give_up(const File& file, std::uint64_t size, std::uint64_t bytes, int error) {
  if (file.size_bytes() != size && ::ftruncate(file.fd(), static_cast<off_t>(size)) != 0) error = errno;
  const Room room = room_for(file, bytes);
  throw Error(Code::kIo,
              {file.path().string(),
               fmt::format("cannot reserve {} bytes: {} more are needed and {} are free", bytes, room.missing,
                           room.available ? fmt::to_string(*room.available) : "an unknown number"),
               error, error == EFBIG ? "raise the file size limit (ulimit -f)" : "free space or choose another drive"});
}

}  // namespace

bool File::reserve(std::uint64_t bytes) {
  const std::uint64_t size = size_bytes();
  if (bytes == 0) return true;
  if (size == 0) switch_off_copy_on_write(*this);
  // Growing past the process's file size limit raises SIGXFSZ, which kills; so it is asked first.
  struct rlimit limit;
  const bool too_large =
      ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur;
  if (too_large) give_up(*this, size, bytes, EFBIG);
  // Where there is no reserving, the blocks of a file that is long enough say nothing: it may be compressed.
  if (bytes <= size && ::fallocate(fd_, 0, 0, 1) != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) return false;
  // A reservation that cannot succeed is not begun: filling a disk to its brim for a moment hurts everybody else on it.
  const Room room = room_for(*this, bytes);
  if (room.available && room.missing > *room.available) give_up(*this, size, bytes, ENOSPC);
  // Only what has no blocks yet: XFS wants free space for all that is asked for, whether it is there or not.
  for (const Range& hole : holes_in(fd_, bytes).value_or(std::vector<Range>{{0, bytes}})) {
    int error = 0;
    do {
      error = ::fallocate(fd_, 0, static_cast<off_t>(hole.offset), static_cast<off_t>(hole.bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP || error == ENOSYS) return false;
    if (error != 0) give_up(*this, size, bytes, error);
  }
  if (size_bytes() < bytes && ::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) give_up(*this, size, bytes, errno);
  return true;
}

void File::preallocate(std::uint64_t bytes) {
  const std::uint64_t size = size_bytes();
  if (reserve(bytes) || bytes <= size) return;
  log(LogLevel::kWarning,
      fmt::format("{}: the file system cannot reserve space; writing {} bytes of zeros instead, once", path_.string(),
                  bytes - size));
  if (const int error = append_zeros(*this, size, bytes); error != 0) give_up(*this, size, bytes, error);
}

}  // namespace spillway
