// A directory that `python -m spillway.prepare` made: rows of documents, with what is to be learned of them.
//
//   header.json   what is there, docs/data.md
//   tokens.bin    row after row, T ids of 16 or 32 bits each
//   starts.bin    row after row, ceil(T / 8) bytes: bit i % 8 of byte i / 8 says that a document begins at position i
//   targets.bin   the same: the token after position i is to be predicted there
//
// Nothing is kept but the row in work. Thread: one. Errors: spillway::Error with the file as object.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tools/finetune/read_file.h"

namespace spillway::models::finetune {

// Of a tokenizer's files those that say which number a piece of text has.
inline constexpr std::array kVocabularies = {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
                                             "vocab.txt"};

class PreparedData {
 public:
  enum class Verify { kSizes, kChecksums };

  // Looks the header and the sizes of the files over, and compares the largest token with the model's vocabulary.
  // kChecksums reads all of the files once as well.
  PreparedData(const std::filesystem::path& directory, std::uint32_t vocabulary, Verify verify = Verify::kSizes);

  // Refuses a model whose tokenizer is another than the one the data was made with; one without any is taken.
  void check_tokenizer(const std::filesystem::path& model) const;

  // Of the header alone: T.
  static std::uint32_t row_length_of(const std::filesystem::path& directory);

  std::uint64_t rows() const noexcept { return header_.rows; }
  std::uint32_t sequence() const noexcept { return header_.sequence; }  // T
  std::uint64_t documents() const noexcept { return header_.documents; }
  // A row holds several documents, or pieces of some that were split, which do not see each other.
  bool packed() const noexcept { return header_.pieces > header_.rows; }
  std::uint64_t targets() const noexcept { return header_.targets; }  // of all rows
  // What tells one directory from another: rows and T, and a hash of the header, which has the files' checksums.
  const std::string& mark() const noexcept { return header_.mark; }
  // The tokenizer's files that say what a token is, each with its sha256; empty: the header does not say them.
  using Vocabularies = std::vector<std::pair<std::string, std::string>>;
  const Vocabularies& vocabularies() const noexcept { return header_.vocabularies; }

  struct Row {
    std::span<std::uint32_t> tokens;
    std::span<std::uint32_t> starts;   // of each token, the first position of its document in the row
    std::span<std::uint32_t> targets;  // the token after it; kNoTarget of tools/models where no loss is taken
  };
  // Each span: sequence() long. Row `row` modulo rows(). Padding after the last document counts as one more, which has
  // no target.
  void read_row(std::uint64_t row, const Row& out);
  // Of that row.
  std::uint64_t targets_of(std::uint64_t row);

 private:
  struct Header {
    std::uint64_t rows = 0, documents = 0, pieces = 0, targets = 0;
    std::uint32_t sequence = 0;
    std::size_t token_bytes = 0;
    std::string mark, tokens_sha256, starts_sha256, targets_sha256;
    std::string tokenizer;  // its name
    Vocabularies vocabularies;
  };

  static Header header_of(const std::filesystem::path& directory, std::uint32_t vocabulary);
  void check(const ReadFile& file, std::uint64_t bytes_of_row, const std::string& sha256, Verify verify) const;
  [[noreturn]] void refuse(const ReadFile& file, std::uint64_t row, std::uint64_t position, std::string what) const;

  std::uint32_t vocabulary_;
  Header header_;
  ReadFile tokens_, starts_, targets_;
  std::vector<unsigned char> token_bytes_, start_bits_, target_bits_;
};

}  // namespace spillway::models::finetune
