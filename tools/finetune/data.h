// A file of tokens, read row by row.
//
// FILE.bin holds little-endian 16-bit token ids; anything else is bytes, ids 0 to 255. Row r is
// tokens[r * T : r * T + T + 1]: T inputs, and the same shifted by one as targets. Rows wrap round at the end. Nothing
// is kept but the row in work. Thread: one. Errors: spillway::Error with the path as object.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tools/finetune/read_file.h"

namespace spillway::models::finetune {

class TokenFile {
 public:
  // Reads the whole file once (but for holes, which are zeros) to refuse a token that the vocabulary does not have
  // before anything is trained.
  TokenFile(std::filesystem::path path, std::uint32_t sequence, std::uint32_t vocabulary);

  std::uint64_t tokens() const noexcept { return tokens_; }
  bool is_text() const noexcept { return token_bytes_ == 1; }
  const std::filesystem::path& path() const noexcept { return file_.path(); }
  std::uint64_t rows() const noexcept { return (tokens_ - 1) / sequence_; }
  // What tells one file from another without reading it all: its length, and a hash of its first and last 64 KiB.
  std::string mark();
  // out: sequence + 1 tokens of row `row` modulo rows().
  void read_row(std::uint64_t row, std::span<std::uint32_t> out);

 private:
  void read(std::uint64_t first, std::span<std::uint32_t> out);
  void check_tokens();

  ReadFile file_;
  std::uint32_t sequence_, vocabulary_;
  std::size_t token_bytes_;
  std::uint64_t tokens_;
  std::vector<unsigned char> bytes_;
};

}  // namespace spillway::models::finetune
