// Where the rows of a run come from: a file of tokens, or a directory that `python -m spillway.prepare` made.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/finetune/data.h"
#include "tools/finetune/prepared.h"

namespace spillway::models::finetune {

// Tokens of a row of prepared data; nothing: it is none, but a file.
std::optional<std::uint32_t> row_length_of(const std::filesystem::path& data);

class Rows {
 public:
  // Refuses tokens that the vocabulary does not have before anything is trained.
  Rows(const std::filesystem::path& data, std::uint32_t sequence, std::uint32_t vocabulary);

  std::uint64_t count() const { return prepared_ ? prepared_->rows() : tokens_->rows(); }
  // A row holds several documents, which do not see each other.
  bool packed() const { return prepared_ && prepared_->documents() > prepared_->rows(); }
  // What tells one source from another.
  std::string mark() { return prepared_ ? prepared_->mark() : tokens_->mark(); }
  std::string describe() const;

  // Each of `sequence` values; of row `row` modulo count(). See PreparedData::Row.
  void read(std::uint64_t row, const PreparedData::Row& out);
  // Tokens of the row that are learned.
  std::uint64_t targets(std::uint64_t row);

 private:
  std::uint32_t sequence_;
  std::optional<TokenFile> tokens_;  // one of the two
  std::optional<PreparedData> prepared_;
  std::vector<std::uint32_t> row_;
};

}  // namespace spillway::models::finetune
