#include "tools/finetune/data.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

#include "spillway/error.h"
#include "spillway/log.h"
#include "tools/terminal/amount.h"
#include "tools/terminal/byte_bar.h"

namespace spillway::models::finetune {
namespace {

constexpr std::uint64_t kScanTokens = 1 << 18;
constexpr std::uint64_t kSaidBytes = 4ull << 30;  // take seconds to look through

[[noreturn]] void refuse(const std::filesystem::path& path, std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument,
              {.object = path.string(), .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

}  // namespace

TokenFile::TokenFile(std::filesystem::path path, std::uint32_t sequence, std::uint32_t vocabulary)
    : file_(std::move(path), "name a file of tokens or text"),
      sequence_(sequence),
      vocabulary_(vocabulary),
      token_bytes_(file_.path().extension() == ".bin" ? 2 : 1),
      tokens_(file_.size() / token_bytes_) {
  if (file_.size() % token_bytes_ != 0) {
    refuse(file_.path(), fmt::format("holds {} bytes, which are no whole 16-bit tokens", file_.size()),
           "a .bin file is little-endian uint16; give text another name");
  }
  if (tokens_ < std::uint64_t{sequence_} + 1) {
    refuse(file_.path(), fmt::format("holds {} tokens, and one row takes {}", tokens_, std::uint64_t{sequence_} + 1),
           "use a longer file or a shorter --seq");
  }
  bytes_.resize(token_bytes_ * std::max<std::uint64_t>(std::uint64_t{sequence_} + 1, std::min(tokens_, kScanTokens)));
  check_tokens();
}

void TokenFile::check_tokens() {
  const std::uint64_t possible = token_bytes_ == 2 ? 65536 : 256;
  if (vocabulary_ >= possible) return;
  std::vector<std::uint32_t> chunk(std::min(tokens_, kScanTokens));
  const std::uint64_t bytes = tokens_ * token_bytes_;
  if (bytes >= kSaidBytes) {
    log(LogLevel::kInfo, fmt::format("{}: {} are looked through for tokens outside the vocabulary of {}",
                                     file_.path().string(), terminal::text_of_size(bytes), vocabulary_));
  }
  terminal::ByteBar bar(fmt::format("looking through {}", file_.path().string()));
  for (std::uint64_t first = 0; first < tokens_; first += kScanTokens) {
    bar.at(first, tokens_);
    first = file_.data_from(first * token_bytes_) / token_bytes_;
    if (first >= tokens_) break;  // nothing but a hole is left
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
  file_.read(offset, std::span(bytes_).first(out.size() * token_bytes_));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = token_bytes_ == 2 ? static_cast<std::uint32_t>(bytes_[2 * i] | bytes_[2 * i + 1] << 8) : bytes_[i];
    if (out[i] >= vocabulary_) {
      refuse(file_.path(),
             fmt::format("token {} at byte offset {} is outside the model's vocabulary of {}", out[i],
                         offset + i * token_bytes_, vocabulary_),
             "tokenize with the model's own tokenizer");
    }
  }
}

std::string TokenFile::mark() {
  constexpr std::uint64_t kEnd = 64 << 10;
  const std::uint64_t bytes = tokens_ * token_bytes_, head = std::min(bytes, kEnd), tail = std::min(bytes - head, kEnd);
  std::vector<unsigned char> ends(head + tail);
  file_.read(0, std::span(ends).first(head));
  file_.read(bytes - tail, std::span(ends).last(tail));
  return fmt::format("{} bytes, {:016x}", bytes, XXH3_64bits(ends.data(), ends.size()));
}

}  // namespace spillway::models::finetune
