// The rows of a step, or of a pass over held-out ones, that a rank takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/finetune/rows.h"
#include "tools/models/trainer.h"

namespace spillway::models::finetune {

struct RowShare {
  std::size_t rows = 0;  // of each rank
  std::uint32_t rank = 0, ranks = 1;
  std::size_t all() const { return rows * ranks; }
};

class StepRowReader {
 public:
  // `rows` outlives this object.
  StepRowReader(Rows& rows, std::uint32_t sequence, RowShare share);

  // Of the rows that come first-th and after, as many as all ranks take, those of this rank. From `end` on they are
  // padding, of which nothing is learned. What it returns refers to memory of this object's.
  StepRows read(std::uint64_t first, std::uint64_t end = UINT64_MAX);

 private:
  Rows& rows_;
  const std::size_t sequence_;
  const RowShare share_;
  std::vector<std::uint32_t> inputs_, targets_, starts_;
};

}  // namespace spillway::models::finetune
