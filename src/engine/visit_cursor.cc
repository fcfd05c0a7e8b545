#include "src/engine/visit_cursor.h"

namespace spillway {

std::optional<std::size_t> VisitCursor::advance(std::uint32_t block, Pass pass) {
  if (recording_) recorded_.push_back({block, pass});
  // Forward only: a visit that was left out is not waited for, and one that comes late counts as unplanned.
  for (std::size_t v = next_; v < visits_.size(); ++v) {
    if (visits_[v].block != block || visits_[v].pass != pass) continue;
    if (v != next_) ++unplanned_;
    next_ = v + 1;
    return v;
  }
  ++unplanned_;
  return std::nullopt;
}

}  // namespace spillway
