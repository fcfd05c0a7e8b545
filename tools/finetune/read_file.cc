#include "tools/finetune/read_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "spillway/error.h"

namespace spillway::models::finetune {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, Code code, std::string happened, int error,
                       std::string hint) {
  throw Error(
      code, {.object = path.string(), .happened = std::move(happened), .errno_value = error, .hint = std::move(hint)});
}

}  // namespace

ReadFile::ReadFile(std::filesystem::path path, const char* wanted) : path_(std::move(path)) {
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever; regular files take no notice of it.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd_ < 0) fail(path_, Code::kNotFound, "cannot be opened", errno, wanted);
  try {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) fail(path_, Code::kIo, "its size cannot be read", errno, "check the file system");
    if (!S_ISREG(status.st_mode)) fail(path_, Code::kInvalidArgument, "is not a regular file", 0, wanted);
    size_ = static_cast<std::uint64_t>(status.st_size);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

ReadFile::~ReadFile() { ::close(fd_); }

std::uint64_t ReadFile::data_from(std::uint64_t offset) const {
  const auto data = ::lseek(fd_, static_cast<off_t>(offset), SEEK_DATA);
  if (data < 0 && errno == ENXIO) return size_;
  return data < 0 ? offset : std::max(offset, static_cast<std::uint64_t>(data));  // some file systems cannot say
}

void ReadFile::read(std::uint64_t offset, std::span<unsigned char> out) const {
  for (std::size_t done = 0; done < out.size();) {
    const ssize_t got = ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(path_, Code::kIo, fmt::format("read of {} bytes at offset {} failed", out.size(), offset), errno,
           "check the drive");
    }
    if (got == 0) {
      fail(path_, Code::kIo, fmt::format("ended at offset {}, earlier than when it was opened", offset + done), 0,
           "leave the file alone while it is trained on");
    }
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace spillway::models::finetune
