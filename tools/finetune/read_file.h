// A file of data that is read in pieces, at any offset. Thread: any. Errors: spillway::Error with the path as object.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

namespace spillway::models::finetune {

class ReadFile {
 public:
  // `wanted`: the hint where it cannot be opened or is no regular file.
  ReadFile(std::filesystem::path path, const char* wanted);
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;
  ~ReadFile();

  const std::filesystem::path& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }  // when it was opened
  // All of `out`; a file that has become shorter is an error.
  void read(std::uint64_t offset, std::span<unsigned char> out) const;
  // Where data begin from `offset` on, which is there if there are no holes; size() where only holes are left.
  std::uint64_t data_from(std::uint64_t offset) const;

 private:
  std::filesystem::path path_;
  std::uint64_t size_ = 0;
  int fd_ = -1;
};

}  // namespace spillway::models::finetune
