#include "tests/aio/simulated_disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <thread>

#include "spillway/error.h"

// The linker's names for the calls as aio makes them: with 64-bit offsets.
extern "C" {
int __real_open64(const char*, int, ...);
int __real_close(int);
ssize_t __real_pread64(int, void*, size_t, off64_t);
ssize_t __real_pwrite64(int, const void*, size_t, off64_t);
int __real_fallocate64(int, int, off64_t, off64_t);
int __real_ftruncate64(int, off64_t);
int __real_fdatasync(int);
int __real_fsync(int);
int __real_rename(const char*, const char*);
int __real_unlink(const char*);
int __real_statx(int, const char*, int, unsigned, struct statx*);
}

namespace spillway::testing {
namespace {

std::atomic<SimulatedDisk*> mounted = nullptr;

// What a call does when a fault is all that comes of it.
bool fails(const Fault& fault) {
  if (fault.delay_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(fault.delay_seconds));
  if (fault.error != 0) errno = fault.error;
  return fault.error != 0;
}

std::byte mask_of(std::uint64_t bit) { return static_cast<std::byte>(1u << bit % 8); }

}  // namespace

SimulatedDisk::SimulatedDisk(std::filesystem::path root, DiskLog so_far)
    : root_(std::move(root)), log_(std::move(so_far)) {
  const DiskImage there = image_at(log_, log_.positions, everything_stored());
  entries_ = there.entries;
  for (const auto& entry : std::filesystem::directory_iterator(root_)) {
    if (entry.is_directory()) log_.base.directories.insert(entry.path().filename().string());
  }
  SPILLWAY_CHECK(mounted == nullptr, "one disk at a time");
  mounted = this;
}

SimulatedDisk::~SimulatedDisk() { mounted = nullptr; }

DiskLog SimulatedDisk::log() const {
  std::lock_guard lock(mutex_);
  return log_;
}

std::size_t SimulatedDisk::position() const {
  std::lock_guard lock(mutex_);
  return log_.positions;
}

void SimulatedDisk::misbehave(DiskScript script) {
  std::lock_guard lock(mutex_);
  recording_ = false;
  script_ = std::move(script);
  unsynced_.clear();
}

bool SimulatedDisk::lied() const {
  std::lock_guard lock(mutex_);
  return !lies_.empty();
}

void SimulatedDisk::repair() {
  std::lock_guard lock(mutex_);
  for (const auto& [name, file] : entries_) {
    const int fd = __real_open64((root_ / name).c_str(), O_RDWR | O_CLOEXEC);
    for (auto lie = lies_.lower_bound({file, 0}); fd >= 0 && lie != lies_.end() && lie->first.first == file; ++lie) {
      const auto stored = __real_pwrite64(fd, lie->second.data(), kDiskSector, static_cast<off64_t>(lie->first.second));
      SPILLWAY_CHECK(stored == static_cast<ssize_t>(kDiskSector), "the disk below this one is well");
    }
    if (fd >= 0) __real_close(fd);
  }
  lies_.clear();
}

void SimulatedDisk::forget_lies() {
  std::lock_guard lock(mutex_);
  lies_.clear();
}

std::optional<std::string> SimulatedDisk::name_of(const std::filesystem::path& path) const {
  const std::string text = path.string(), below = root_.string() + "/";
  if (text == root_) return "";
  if (!text.starts_with(below)) return std::nullopt;
  return text.substr(below.size());
}

std::optional<SimulatedDisk::Opened> SimulatedDisk::opened(int fd) const {
  std::lock_guard lock(mutex_);
  const auto found = opened_.find(fd);
  return found == opened_.end() ? std::nullopt : std::optional(found->second);
}

Fault SimulatedDisk::ask(DiskOp op, const std::string& name, std::uint64_t offset, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  return script_ ? script_({op, name, offset, bytes}) : Fault{};
}

std::size_t SimulatedDisk::begin(DiskChange change) {
  std::lock_guard lock(mutex_);
  if (!recording_) return SIZE_MAX;
  change.begun = log_.positions++;
  log_.changes.push_back(std::move(change));
  return log_.changes.size() - 1;
}

void SimulatedDisk::end(std::size_t index) {
  std::lock_guard lock(mutex_);
  if (recording_) log_.changes[index].ended = log_.positions++;
}

int SimulatedDisk::open(const char* path, int flags, mode_t mode) {
  const auto name = name_of(path);
  if (name && fails(ask(DiskOp::kOpen, *name))) return -1;
  const int fd = __real_open64(path, flags, mode);
  if (!name || fd < 0) return fd;
  struct stat status {};
  ::fstat(fd, &status);
  if (S_ISDIR(status.st_mode)) {
    std::lock_guard lock(mutex_);
    opened_[fd] = {*name, std::nullopt, -1};
    return fd;
  }
  std::uint32_t file = 0;
  bool made = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(*name);
    made = found == entries_.end();
    file = made ? log_.next_file++ : found->second;
    entries_[*name] = file;
    opened_[fd] = {*name, file, __real_open64(path, O_RDWR | O_CLOEXEC)};
  }
  if (made) {
    if (const auto index = begin({.op = DiskOp::kOpen, .file = file, .name = *name}); index != SIZE_MAX) end(index);
  }
  return fd;
}

int SimulatedDisk::close(int fd) {
  {
    std::lock_guard lock(mutex_);
    if (const auto closed = opened_.extract(fd); closed && closed.mapped().plain >= 0) {
      __real_close(closed.mapped().plain);
    }
  }
  return __real_close(fd);
}

ssize_t SimulatedDisk::read(int fd, void* to, std::size_t bytes, off_t offset) {
  const auto at = opened(fd);
  if (!at) return __real_pread64(fd, to, bytes, offset);
  const Fault fault = ask(DiskOp::kRead, at->name, static_cast<std::uint64_t>(offset), bytes);
  if (fails(fault)) return -1;
  if (fault.bytes != 0) bytes = std::min<std::uint64_t>(bytes, fault.bytes);
  const ssize_t moved = __real_pread64(fd, to, bytes, offset);
  if (fault.flipped_bit && moved > 0 && *fault.flipped_bit / 8 < static_cast<std::uint64_t>(moved)) {
    static_cast<std::byte*>(to)[*fault.flipped_bit / 8] ^= mask_of(*fault.flipped_bit);
  }
  return moved;
}

ssize_t SimulatedDisk::write(int fd, const void* from, std::size_t bytes, off_t offset) {
  const auto at = opened(fd);
  if (!at || !at->file) return __real_pwrite64(fd, from, bytes, offset);
  const auto* source = static_cast<const std::byte*>(from);
  const Fault fault = ask(DiskOp::kWrite, at->name, static_cast<std::uint64_t>(offset), bytes);
  note_unsynced(*at, static_cast<std::uint64_t>(offset), bytes);
  if (fault.flipped_bit || fault.stored_sectors) {
    return write_wrongly(*at, source, bytes, static_cast<std::uint64_t>(offset), fault);
  }
  if (fails(fault)) return -1;
  if (fault.bytes != 0) bytes = std::min<std::uint64_t>(bytes, fault.bytes);
  DiskChange change{.op = DiskOp::kWrite, .file = *at->file, .offset = static_cast<std::uint64_t>(offset)};
  change.data = std::make_shared<const std::vector<std::byte>>(source, source + bytes);
  const std::size_t index = begin(std::move(change));
  const ssize_t moved = __real_pwrite64(fd, from, bytes, offset);
  SPILLWAY_CHECK(index == SIZE_MAX || moved == static_cast<ssize_t>(bytes), "the disk below this one is well");
  if (index != SIZE_MAX) end(index);
  if (moved > 0) note_stored(*at->file, static_cast<std::uint64_t>(offset), static_cast<std::uint64_t>(moved));
  return moved;
}

// A write of which some sectors are not stored, or one is with a wrong bit.
ssize_t SimulatedDisk::write_wrongly(const Opened& at, const std::byte* from, std::uint64_t bytes, std::uint64_t offset,
                                     const Fault& fault) {
  for (std::uint64_t first = 0, n = 0; first < bytes; first += kDiskSector, ++n) {
    Sector sector{};
    const std::uint64_t length = std::min(kDiskSector, bytes - first);
    std::copy_n(from + first, length, sector.begin());
    const bool flipped = fault.flipped_bit && *fault.flipped_bit / 8 / kDiskSector == n;
    const bool stored = !fault.stored_sectors || (*fault.stored_sectors >> n % 64 & 1) != 0;
    if (flipped) sector[*fault.flipped_bit / 8 % kDiskSector] ^= mask_of(*fault.flipped_bit);
    if (stored) {
      const ssize_t moved = __real_pwrite64(at.plain, sector.data(), length, static_cast<off64_t>(offset + first));
      SPILLWAY_CHECK(moved == static_cast<ssize_t>(length), "the disk below this one is well");
      note_stored(*at.file, offset + first, length);
    }
    if ((flipped || !stored) && fault.error == 0) note_lie(*at.file, offset + first, from + first);
  }
  return fails(fault) ? -1 : static_cast<ssize_t>(bytes);
}

void SimulatedDisk::note_unsynced(const Opened& at, std::uint64_t offset, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (!script_) return;
  std::vector<std::byte> before(bytes);  // zeros beyond the end of the file
  if (__real_pread64(at.plain, before.data(), bytes, static_cast<off64_t>(offset)) < 0) return;
  unsynced_.push_back({*at.file, offset, std::move(before)});
}

void SimulatedDisk::lose_unsynced(const Opened& at) {
  std::lock_guard lock(mutex_);
  while (!unsynced_.empty()) {
    const Unsynced last = std::move(unsynced_.back());
    unsynced_.pop_back();
    if (last.file != at.file || losses_() % 2 == 0) continue;
    const auto stored =
        __real_pwrite64(at.plain, last.before.data(), last.before.size(), static_cast<off64_t>(last.offset));
    SPILLWAY_CHECK(stored == static_cast<ssize_t>(last.before.size()), "the disk below this one is well");
  }
}

void SimulatedDisk::note_stored(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  lies_.erase(lies_.lower_bound({file, offset}), lies_.lower_bound({file, offset + bytes}));
}

void SimulatedDisk::note_lie(std::uint32_t file, std::uint64_t offset, const std::byte* truth) {
  std::lock_guard lock(mutex_);
  std::copy_n(truth, kDiskSector, lies_[{file, offset}].begin());
}

int SimulatedDisk::resize(int fd, std::uint64_t bytes, const std::function<int()>& call) {
  const auto at = opened(fd);
  if (!at || !at->file) return call();
  if (fails(ask(DiskOp::kResize, at->name, 0, bytes))) return -1;
  const int result = call();
  struct stat status {};
  ::fstat(fd, &status);
  DiskChange change{.op = DiskOp::kResize, .file = *at->file, .offset = static_cast<std::uint64_t>(status.st_size)};
  if (const auto index = begin(std::move(change)); index != SIZE_MAX) end(index);
  return result;
}

int SimulatedDisk::sync(int fd) {
  const auto at = opened(fd);
  if (!at) return 0;
  const Fault fault = ask(at->file ? DiskOp::kSync : DiskOp::kSyncDirectory, at->name);
  if (at->file && fault.error != 0) lose_unsynced(*at);
  if (fails(fault)) return -1;
  if (at->file) {
    std::lock_guard lock(mutex_);
    std::erase_if(unsynced_, [&](const Unsynced& write) { return write.file == *at->file; });
  }
  DiskChange change{.op = DiskOp::kSync, .file = at->file.value_or(0), .name = at->name};
  if (!at->file) {
    change.op = DiskOp::kSyncDirectory;
    for (const auto& entry : std::filesystem::directory_iterator(root_ / at->name)) {
      if (entry.is_directory()) change.holds.push_back(*name_of(entry.path()));
    }
  }
  if (const auto index = begin(std::move(change)); index != SIZE_MAX) end(index);
  return 0;
}

int SimulatedDisk::rename(const char* from, const char* to) {
  const auto name = name_of(from), new_name = name_of(to);
  if (!name || !new_name) return __real_rename(from, to);
  if (fails(ask(DiskOp::kRename, *name))) return -1;
  const int result = __real_rename(from, to);
  if (result != 0) return result;
  {
    std::lock_guard lock(mutex_);
    const auto moved = entries_.extract(*name);
    if (moved) entries_[*new_name] = moved.mapped();
    for (auto& [fd, opened] : opened_) {
      if (moved && opened.file == moved.mapped()) opened.name = *new_name;
    }
  }
  const auto index = begin({.op = DiskOp::kRename, .name = *name, .to = *new_name});
  if (index != SIZE_MAX) end(index);
  return 0;
}

int SimulatedDisk::unlink(const char* path) {
  const auto name = name_of(path);
  if (!name) return __real_unlink(path);
  if (fails(ask(DiskOp::kUnlink, *name))) return -1;
  const int result = __real_unlink(path);
  if (result != 0) return result;
  {
    std::lock_guard lock(mutex_);
    entries_.erase(*name);
  }
  const auto index = begin({.op = DiskOp::kUnlink, .name = *name});
  if (index != SIZE_MAX) end(index);
  return 0;
}

}  // namespace spillway::testing

using spillway::testing::mounted;

extern "C" {
int __wrap_open64(const char* path, int flags, ...) {
  std::va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  auto* disk = mounted.load();
  return disk ? disk->open(path, flags, mode) : __real_open64(path, flags, mode);
}
int __wrap_close(int fd) {
  auto* disk = mounted.load();
  return disk ? disk->close(fd) : __real_close(fd);
}
ssize_t __wrap_pread64(int fd, void* to, size_t bytes, off64_t offset) {
  auto* disk = mounted.load();
  return disk ? disk->read(fd, to, bytes, offset) : __real_pread64(fd, to, bytes, offset);
}
ssize_t __wrap_pwrite64(int fd, const void* from, size_t bytes, off64_t offset) {
  auto* disk = mounted.load();
  return disk ? disk->write(fd, from, bytes, offset) : __real_pwrite64(fd, from, bytes, offset);
}
int __wrap_fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  const auto call = [=] { return __real_fallocate64(fd, mode, offset, bytes); };
  auto* disk = mounted.load();
  return disk ? disk->resize(fd, static_cast<std::uint64_t>(offset + bytes), call) : call();
}
int __wrap_ftruncate64(int fd, off64_t bytes) {
  const auto call = [=] { return __real_ftruncate64(fd, bytes); };
  auto* disk = mounted.load();
  return disk ? disk->resize(fd, static_cast<std::uint64_t>(bytes), call) : call();
}
int __wrap_fdatasync(int fd) {
  auto* disk = mounted.load();
  return disk ? disk->sync(fd) : __real_fdatasync(fd);
}
int __wrap_fsync(int fd) {
  auto* disk = mounted.load();
  return disk ? disk->sync(fd) : __real_fsync(fd);
}
int __wrap_rename(const char* from, const char* to) {
  auto* disk = mounted.load();
  return disk ? disk->rename(from, to) : __real_rename(from, to);
}
int __wrap_unlink(const char* path) {
  auto* disk = mounted.load();
  return disk ? disk->unlink(path) : __real_unlink(path);
}
int __wrap_statx(int fd, const char* path, int flags, unsigned mask, struct statx* status) {
  const int result = __real_statx(fd, path, flags, mask, status);
  auto* disk = mounted.load();
  if (!disk || disk->direct() || result != 0) return result;
  status->stx_mask |= STATX_DIOALIGN;
  status->stx_dio_mem_align = status->stx_dio_offset_align = 0;  // direct I/O is not for this file
  return 0;
}
}
