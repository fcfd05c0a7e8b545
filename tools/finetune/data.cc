#include "tools/finetune/data.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>

#include "spillway/error.h"
#include "spillway/log.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/byte_bar.h"

namespace spillway::models::finetune {
namespace {

constexpr std::uint64_t kScanTokens = 1 << 18;
constexpr std::uint64_t kSaidBytes = 4ull << 30;  // take seconds to look through

[[noreturn]] void fail(const std::filesystem::path& path, Code code, std::string happened, int error,
                       std::string hint) {
  throw Error(
      code, {.object = path.string(), .happened = std::move(happened), .errno_value = error, .hint = std::move(hint)});
}

}  // namespace

TokenFile::TokenFile(std::filesystem::path path, std::uint32_t sequence, std::uint32_t vocabulary)
    : path_(std::move(path)),
      sequence_(sequence),
      vocabulary_(vocabulary),
      token_bytes_(path_.extension() == ".bin" ? 2 : 1) {
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever; regular files take no notice of it.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd_ < 0) fail(path_, Code::kNotFound, "cannot be opened", errno, "--data wants a file of tokens or text");
  try {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) fail(path_, Code::kIo, "its size cannot be read", errno, "check the file system");
    if (!S_ISREG(status.st_mode)) {
      fail(path_, Code::kInvalidArgument, "is not a regular file", 0, "--data wants a file of tokens or text");
    }
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size % token_bytes_ != 0) {
      fail(path_, Code::kInvalidArgument, fmt::format("holds {} bytes, which are no whole 16-bit tokens", size), 0,
           "a .bin file is little-endian uint16; give text another name");
    }
    tokens_ = size / token_bytes_;
    if (tokens_ < std::uint64_t{sequence_} + 1) {
      fail(path_, Code::kInvalidArgument,
           fmt::format("holds {} tokens, and one row takes {}", tokens_, std::uint64_t{sequence_} + 1), 0,
           "use a longer file or a shorter --seq");
    }
    bytes_.resize(token_bytes_ * std::max<std::uint64_t>(std::uint64_t{sequence_} + 1, std::min(tokens_, kScanTokens)));
    check_tokens();
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

TokenFile::~TokenFile() { ::close(fd_); }

void TokenFile::check_tokens() {
  const std::uint64_t possible = token_bytes_ == 2 ? 65536 : 256;
  if (vocabulary_ >= possible) return;
  std::vector<std::uint32_t> chunk(std::min(tokens_, kScanTokens));
  const std::uint64_t bytes = tokens_ * token_bytes_;
  if (bytes >= kSaidBytes) {
    log(LogLevel::kInfo, fmt::format("{}: {} are looked through for tokens outside the vocabulary of {}",
                                     path_.string(), terminal::text_of_size(bytes), vocabulary_));
  }
  terminal::ByteBar bar(fmt::format("looking through {}", path_.string()));
  for (std::uint64_t first = 0; first < tokens_; first += kScanTokens) {
    bar.at(first, tokens_);
    const auto data = ::lseek(fd_, static_cast<off_t>(first * token_bytes_), SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;  // nothing but a hole is left
    if (data > 0) first = std::max(first, static_cast<std::uint64_t>(data) / token_bytes_);
    read(first, std::span(chunk).first(std::min(kScanTokens, tokens_ - first)));
  }
  bar.clear();
}

void TokenFile::read_row(std::uint64_t row, std::span<std::uint32_t> out) {
  SPILLWAY_CHECK(out.size() == std::size_t{sequence_} + 1, "a row is sequence + 1 tokens");
  read(row % rows() * sequence_, out);
}

void TokenFile::read(std::uint64_t first, std::span<std::uint32_t> out) {
  const std::uint64_t offset = first * token_bytes_;
  read_bytes(offset, std::span(bytes_).first(out.size() * token_bytes_));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = token_bytes_ == 2 ? static_cast<std::uint32_t>(bytes_[2 * i] | bytes_[2 * i + 1] << 8) : bytes_[i];
    if (out[i] >= vocabulary_) {
      fail(path_, Code::kInvalidArgument,
           fmt::format("token {} at byte offset {} is outside the model's vocabulary of {}", out[i],
                       offset + i * token_bytes_, vocabulary_),
           0, "tokenize with the model's own tokenizer");
    }
  }
}

std::string TokenFile::mark() {
  constexpr std::uint64_t kEnd = 64 << 10;
  const std::uint64_t bytes = tokens_ * token_bytes_, head = std::min(bytes, kEnd), tail = std::min(bytes - head, kEnd);
  std::vector<unsigned char> ends(head + tail);
  read_bytes(0, std::span(ends).first(head));
  read_bytes(bytes - tail, std::span(ends).last(tail));
  return fmt::format("{} bytes, {:016x}", bytes, XXH3_64bits(ends.data(), ends.size()));
}

void TokenFile::read_bytes(std::uint64_t offset, std::span<unsigned char> out) {
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
