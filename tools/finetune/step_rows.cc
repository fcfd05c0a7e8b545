#include "tools/finetune/step_rows.h"

#include <algorithm>
#include <span>

#include "tools/finetune/ranks.h"

namespace spillway::models::finetune {

StepRowReader::StepRowReader(Rows& rows, std::uint32_t sequence, RowShare share)
    : rows_(rows), sequence_(sequence), share_(share) {
  for (auto* values : {&inputs_, &targets_, &starts_}) values->resize(share.rows * sequence_);
}

StepRows StepRowReader::read(std::uint64_t first, std::uint64_t end) {
  const std::uint64_t own = first + first_row_of_rank(share_.rows, share_.rank);
  for (std::size_t r = 0; r < share_.rows; ++r) {
    const auto part = [&](std::vector<std::uint32_t>& of) { return std::span(of).subspan(r * sequence_, sequence_); };
    if (own + r < end) {
      rows_.read(own + r, {.tokens = part(inputs_), .starts = part(starts_), .targets = part(targets_)});
      continue;
    }
    std::ranges::fill(part(inputs_), 0u);
    std::ranges::fill(part(starts_), 0u);
    std::ranges::fill(part(targets_), kNoTarget);
  }
  StepRows read{.inputs = inputs_, .targets = targets_};
  if (rows_.packed()) read.starts = starts_;
  for (std::uint64_t row = first; row < std::min(first + share_.all(), end); ++row) {
    read.target_count += rows_.targets(row);
  }
  return read;
}

}  // namespace spillway::models::finetune
