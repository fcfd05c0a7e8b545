// Ordinary files, read and written through the page cache or by it: model files, not stores. Move-only, closes itself.
// Errors: spillway::Error with the path as object, offset and length in the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace spillway {

// What a symbolic link as the last part of a path is to a reader. One in a directory that came from somebody else may
// lead to what that one has no right to.
enum class Links : std::uint8_t { kFollow, kRefuse };

class PlainFile {
 public:
  PlainFile() = default;
  static PlainFile open_to_read(const std::filesystem::path& path, Links links = Links::kFollow);  // regular files only
  static PlainFile open_to_write(const std::filesystem::path& path);  // one that create() made
  static PlainFile create(const std::filesystem::path& path);         // replaces what is there; never follows a link
  PlainFile(PlainFile&& other) noexcept;
  PlainFile& operator=(PlainFile&& other) noexcept;
  ~PlainFile();

  bool is_open() const { return fd_ >= 0; }
  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size_bytes() const;

  // Whole transfers. A file that ends inside a read is an error (kCorrupt).
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);

  // From now on transfers pass by the page cache; their offset, length and address must be multiples of the result. 0:
  // the file system has none of that, and nothing changes. end_direct() takes it back.
  std::uint64_t begin_direct();
  void end_direct();

  // Gives the file its size and, where the file system can, its space.
  void reserve(std::uint64_t bytes);
  // Lets go of cached pages that touch the range and are on the drive.
  void drop_cached(std::uint64_t offset, std::uint64_t bytes) const;
  // Begins to write the range's dirty pages to the drive, or waits until they are there.
  void write_back(std::uint64_t offset, std::uint64_t bytes, bool wait);
  void sync();
  void close();  // reports what close() says, which on some file systems is the first word of a failed write

 private:
  static PlainFile open(const std::filesystem::path& path, int flags, const char* what);
  int fd_ = -1;
  std::filesystem::path path_;
};

// The whole of a small text file; larger than `most` is an error.
std::string read_text(const std::filesystem::path& path, std::uint64_t most, Links links = Links::kFollow);
void write_text(const std::filesystem::path& path, std::string_view text);  // as create() does, and synced
// A name in a directory, and nothing outside it: for names that come out of files.
bool is_plain_file_name(std::string_view name);
// Makes renames and removals in the directory durable.
void sync_directory(const std::filesystem::path& directory);
// A directory and those above it, as far as they are not there; like files, for their owner only to write.
std::error_code make_directories(const std::filesystem::path& directory);
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);
void remove_file(const std::filesystem::path& path) noexcept;  // no error when it is not there
// Throws kNotFound or kIo with what to do about `error`, an errno.
[[noreturn]] void fail_file(const std::filesystem::path& path, std::string happened, int error);

}  // namespace spillway
