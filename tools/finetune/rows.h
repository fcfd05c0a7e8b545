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
  // Refuses tokens that the vocabulary does not have before anything is trained. `seed`: rows of each epoch come in an
  // order of its own; none: as they lie.
  Rows(const std::filesystem::path& data, std::uint32_t sequence, std::uint32_t vocabulary,
       std::optional<std::uint64_t> seed = {});

  // PreparedData's. And refuses text, whose bytes would be taken for tokens, for a model that has a tokenizer.
  void check_tokenizer(const std::filesystem::path& model) const;

  std::uint64_t count() const { return prepared_ ? prepared_->rows() : tokens_->rows(); }
  // PreparedData's.
  bool packed() const { return prepared_ && prepared_->packed(); }
  // What tells one source, or order, from another.
  std::string mark();
  std::string describe() const;
  PreparedData::Vocabularies vocabularies() const {
    return prepared_ ? prepared_->vocabularies() : PreparedData::Vocabularies();
  }

  // Each of `sequence` values; of the row that comes `position`-th. See PreparedData::Row.
  void read(std::uint64_t position, const PreparedData::Row& out);
  // Tokens of that row that are learned.
  std::uint64_t targets(std::uint64_t position);

 private:
  std::uint64_t row_at(std::uint64_t position) const;

  std::uint32_t sequence_;
  std::optional<std::uint64_t> seed_;
  std::optional<TokenFile> tokens_;  // one of the two
  std::optional<PreparedData> prepared_;
  std::vector<std::uint32_t> row_;
};

}  // namespace spillway::models::finetune
