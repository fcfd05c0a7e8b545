#include "tools/terminal/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "spillway/error.h"
#include "tools/terminal/tell.h"

namespace spillway::terminal {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& option, const fs::path& file, int error) {
  const char* hint = error == ENOSPC || error == EDQUOT ? "make room, or name a file on another drive"
                     : error == EFBIG                   ? "raise ulimit -f"
                                      : "name a file in a directory that exists and that you may write to";
  throw Error(Code::kIo, {.object = file.string(),
                          .happened = fmt::format("the output of {} cannot be written", option),
                          .errno_value = error,
                          .hint = hint});
}

fs::path directory_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path("."); }

struct OutputTarget {
  fs::path file;
  bool renamed;  // to it, when it is whole; a device or a pipe is written through
};

// A link stays: what it leads to is written.
OutputTarget place_of(const fs::path& named) {
  std::error_code error;
  fs::path file = fs::canonical(named, error);
  if (error) file = named;
  const fs::file_status status = fs::symlink_status(file, error);
  return {file, !fs::exists(status) || fs::is_regular_file(status)};
}

bool is_standard_output(const fs::path& file) {
  std::error_code ignored;
  return file == "-" || fs::equivalent(file, "/dev/stdout", ignored);
}

}  // namespace

void check_output(const std::string& option, const fs::path& file) {
  if (file.empty() || is_standard_output(file)) return;
  std::error_code error;
  if (fs::is_directory(file, error)) refuse(option, file, EISDIR);
  const OutputTarget place = place_of(file);
  const fs::path directory = directory_of(place.file);
  if (!fs::is_directory(directory, error)) refuse(option, file, error ? error.value() : ENOTDIR);
  const int wanted = place.renamed ? W_OK | X_OK : W_OK;
  if (::access((place.renamed ? directory : place.file).c_str(), wanted) != 0) refuse(option, file, errno);
}

void write_output(const std::string& option, const fs::path& file, const std::string& text) {
  if (is_standard_output(file)) {
    tell("{}\n", text);
    return;
  }
  const OutputTarget place = place_of(file);
  const fs::path written =
      place.renamed ? directory_of(place.file) / fmt::format(".{}.{}", place.file.filename().string(), ::getpid())
                    : place.file;
  std::FILE* out = std::fopen(written.c_str(), place.renamed ? "wx" : "w");
  if (out == nullptr) refuse(option, file, errno);
  const bool fine = std::fwrite(text.data(), 1, text.size(), out) == text.size() && std::fputc('\n', out) != EOF;
  int error = fine ? 0 : errno;
  if (std::fclose(out) != 0 && error == 0) error = errno;
  if (place.renamed && error == 0 && std::rename(written.c_str(), place.file.c_str()) != 0) error = errno;
  if (error == 0) return;
  if (place.renamed) ::unlink(written.c_str());
  refuse(option, file, error);
}

}  // namespace spillway::terminal
