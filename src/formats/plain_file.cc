#include "src/formats/plain_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "aio/direct_io.h"
#include "aio/directory.h"
#include "spillway/error.h"
#include "spillway/units.h"

namespace spillway {
namespace {

constexpr std::uint64_t kCachePage = 4096;

const char* hint_for(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG: return "check the path";
    case EISDIR: return "name a file";
    case EEXIST: return "something else made it meanwhile; try again";
    case ENOSPC:
    case EDQUOT: return "free some space, or name another directory";
    case EACCES:
    case EPERM: return "check who may read and write it, and its directory";
    case EROFS: return "name a directory on a file system that can be written";
    case EFBIG: return "raise ulimit -f, or name another directory";
    case EMFILE:
    case ENFILE: return "raise ulimit -n";
    default: return "check the drive; the kernel's log may say more";
  }
}

[[noreturn]] void fail(const std::filesystem::path& path, std::string happened, int error) {
  const bool missing = error == ENOENT || error == ENOTDIR;
  throw Error(
      missing ? Code::kNotFound : Code::kIo,
      {.object = path.string(), .happened = std::move(happened), .errno_value = error, .hint = hint_for(error)});
}

std::string span_text(const char* verb, std::uint64_t bytes, std::uint64_t offset) {
  return fmt::format("{} of {} bytes at offset {} failed", verb, bytes, offset);
}

}  // namespace

PlainFile PlainFile::open(const std::filesystem::path& path, int flags, const char* what) {
  PlainFile file;
  file.path_ = path;
  file.fd_ = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (file.fd_ < 0) fail(path, what, errno);
  return file;
}

PlainFile PlainFile::open_to_read(const std::filesystem::path& path, Links links) {
  const int follow = links == Links::kRefuse ? O_NOFOLLOW : 0;
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever; regular files take no notice of it.
  PlainFile file = open(path, O_RDONLY | O_NONBLOCK | follow, "cannot be opened");
  struct stat status {};
  if (::fstat(file.fd_, &status) != 0) fail(path, "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) {
    throw Error(
        Code::kInvalidArgument,
        {.object = path.string(), .happened = "is not a regular file", .errno_value = 0, .hint = "name a file"});
  }
  return file;
}

PlainFile PlainFile::open_to_write(const std::filesystem::path& path) {
  return open(path, O_WRONLY | O_NOFOLLOW, "cannot be opened for writing");
}

PlainFile PlainFile::create(const std::filesystem::path& path) {
  remove_file(path);
  return open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, "cannot be created");
}

PlainFile::PlainFile(PlainFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

PlainFile& PlainFile::operator=(PlainFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

PlainFile::~PlainFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t PlainFile::size_bytes() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) fail(path_, "cannot be examined", errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void PlainFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, span_text("read", out.size(), offset), errno);
    if (got == 0) {
      throw Error(Code::kCorrupt,
                  {.object = path_.string(),
                   .happened = fmt::format("the file ends at byte {}, {} bytes early", offset, out.size()),
                   .errno_value = 0,
                   .hint = "it was cut short; copy it again"});
    }
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

void PlainFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail(path_, span_text("write", bytes.size(), offset), put < 0 ? errno : EIO);
    offset += static_cast<std::uint64_t>(put);
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
}

std::uint64_t PlainFile::begin_direct() {
  const DirectIo direct = enable_direct_io(fd_, true);
  return direct.granted ? direct.alignment : 0;
}

void PlainFile::end_direct() {
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags < 0 || ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) fail(path_, "cannot leave direct I/O", errno);
}

void PlainFile::reserve(std::uint64_t bytes) {
  // Not posix_fallocate: where the file system cannot reserve it writes zeros, and the data would be written twice.
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP) fail(path_, fmt::format("{} bytes cannot be reserved", bytes), errno);
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0)
    fail(path_, fmt::format("cannot be made {} bytes long", bytes), errno);
}

void PlainFile::drop_cached(std::uint64_t offset, std::uint64_t bytes) const {
  // The kernel drops whole pages inside the range only; a page shared with the range before goes this time.
  const std::uint64_t begin = align_down(offset, kCachePage);
  ::posix_fadvise(fd_, static_cast<off_t>(begin), static_cast<off_t>(offset + bytes - begin), POSIX_FADV_DONTNEED);
}

void PlainFile::write_back(std::uint64_t offset, std::uint64_t bytes, bool wait) {
  // Whoever waits is told of a write that failed, and sync() is not any more.
  const unsigned waiting = wait ? SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER : 0;
  const int result =
      ::sync_file_range(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE | waiting);
  // ENOSYS (gVisor): it did nothing, and sync() does all of it.
  if (result != 0 && errno != ENOSYS) fail(path_, span_text("write-back", bytes, offset), errno);
}

void PlainFile::sync() {
  if (::fsync(fd_) != 0) fail(path_, "sync failed", errno);
}

void PlainFile::close() {
  if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0) fail(path_, "close failed", errno);
}

std::string read_text(const std::filesystem::path& path, std::uint64_t most, Links links) {
  const PlainFile file = PlainFile::open_to_read(path, links);
  const std::uint64_t size = file.size_bytes();
  if (size > most) {
    throw Error(Code::kInvalidArgument, {.object = path.string(),
                                         .happened = fmt::format("it is {} bytes long", size),
                                         .errno_value = 0,
                                         .hint = fmt::format("at most {} make sense here", most)});
  }
  std::string text(size, '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  PlainFile file = PlainFile::create(path);
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
  file.close();
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\0", 2)) == name.npos;
}

std::error_code make_directories(const std::filesystem::path& directory) {
  std::error_code error;
  if (directory.empty() || std::filesystem::is_directory(directory, error)) return {};
  if (directory.has_parent_path() && directory.parent_path() != directory) {
    if ((error = make_directories(directory.parent_path()))) return error;
  }
  // `model/` was made as its own parent; and another process may have been faster.
  if (::mkdir(directory.c_str(), 0755) == 0) return {};
  const int failure = errno;
  if (std::filesystem::is_directory(directory, error)) return {};
  return {failure == EEXIST ? ENOTDIR : failure, std::generic_category()};
}

void sync_directory(const std::filesystem::path& directory) {
  const auto [opened, error] = sync_names(directory);
  if (error == 0 || (opened && error == EINVAL)) return;  // EINVAL: nothing to sync here, as in tmpfs
  fail(directory, opened ? "sync failed" : "cannot be opened", error);
}

void rename_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, "the finished file cannot be given its name", errno);
}

void remove_file(const std::filesystem::path& path) noexcept { ::unlink(path.c_str()); }

void fail_file(const std::filesystem::path& path, std::string happened, int error) {
  fail(path, std::move(happened), error);
}

}  // namespace spillway
