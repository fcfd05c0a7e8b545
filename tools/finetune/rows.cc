#include "tools/finetune/rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "spillway/error.h"
#include "tools/finetune/shuffle.h"

namespace spillway::models::finetune {

std::optional<std::uint32_t> row_length_of(const std::filesystem::path& data) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(data, ignored)) return std::nullopt;
  return PreparedData::row_length_of(data);
}

Rows::Rows(const std::filesystem::path& data, std::uint32_t sequence, std::uint32_t vocabulary,
           std::optional<std::uint64_t> seed)
    : sequence_(sequence), seed_(seed) {
  std::error_code ignored;
  if (std::filesystem::is_directory(data, ignored)) {
    prepared_.emplace(data, vocabulary);
    return;
  }
  tokens_.emplace(data, sequence, vocabulary);
  row_.resize(std::size_t{sequence} + 1);
}

void Rows::check_tokenizer(const std::filesystem::path& model) const {
  if (prepared_) return prepared_->check_tokenizer(model);
  if (!tokens_->is_text()) return;
  for (const char* name : kVocabularies) {
    std::error_code none;
    if (!std::filesystem::exists(model / name, none)) continue;
    throw Error(Code::kInvalidArgument,
                {.object = tokens_->path().string(),
                 .happened = fmt::format("is text, of which each byte is a token here, and the model has others ({})",
                                         (model / name).string()),
                 .errno_value = 0,
                 .hint = "make rows of it first: `python -m spillway.prepare`"});
  }
}

std::string Rows::mark() {
  const std::string data = prepared_ ? prepared_->mark() : tokens_->mark();
  return seed_ ? fmt::format("{}, shuffled by {}", data, *seed_) : data;
}

std::uint64_t Rows::row_at(std::uint64_t position) const {
  return seed_ ? shuffled_row(position, count(), *seed_) : position % count();
}

std::string Rows::describe() const {
  if (!prepared_) return fmt::format("{} rows of {} tokens", count(), sequence_);
  return fmt::format("{} rows of {} tokens with {} documents, {} tokens learned", count(), sequence_,
                     prepared_->documents(), prepared_->targets());
}

void Rows::read(std::uint64_t position, const PreparedData::Row& out) {
  const std::uint64_t row = row_at(position);
  if (prepared_) return prepared_->read_row(row, out);
  tokens_->read_row(row, row_);
  std::copy(row_.begin(), row_.end() - 1, out.tokens.begin());
  std::copy(row_.begin() + 1, row_.end(), out.targets.begin());
  std::ranges::fill(out.starts, 0u);
}

std::uint64_t Rows::targets(std::uint64_t position) {
  return prepared_ ? prepared_->targets_of(row_at(position)) : sequence_;
}

}  // namespace spillway::models::finetune
