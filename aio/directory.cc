#include "aio/directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace spillway {

DirectorySync sync_names(const std::filesystem::path& directory) noexcept {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return {.opened = false, .error = errno};
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return {.opened = true, .error = error};
}

}  // namespace spillway
