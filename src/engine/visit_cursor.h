// Follows the caller through the planned visits of a step: which planned visit a call is, and whether the plan's order
// was kept. It decides nothing about memory; that is WeightResidency (swap/policy/weight_residency.h). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "spillway/model.h"

namespace spillway {

class VisitCursor {
 public:
  // `record`: the visits are a guess; adopt_recorded() replaces them by what the caller really did.
  VisitCursor(std::vector<Visit> visits, bool record) : visits_(std::move(visits)), recording_(record) {}

  void begin_step() {
    next_ = 0;
    recorded_.clear();
  }
  // This is the first visit of the plan, and it does not come next. Never while the plan is a guess.
  bool begins_again(Visit visit) const {
    return !recording_ && next_ > 0 && visit == visits_[0] && (last() || visit != visits_[next_]);
  }
  // The index of the planned visit that this is: the next one, or, when the caller left some out, the first that
  // matches after it; nothing when the plan has no such visit left.
  std::optional<std::size_t> advance(std::uint32_t block, Pass pass);
  // Takes back the last advance(): its visit did not come about.
  struct Position {
    std::size_t next = 0;
    std::uint64_t unplanned = 0;
  };
  Position position() const noexcept { return {next_, unplanned_}; }
  void take_back(Position before) {
    next_ = before.next;
    unplanned_ = before.unplanned;
    if (recording_) recorded_.pop_back();
  }

  std::uint64_t unplanned() const noexcept {
    return unplanned_;
  }  // visits that were not the next one, all steps together

  std::span<const Visit> visits() const noexcept { return visits_; }
  bool last() const noexcept { return next_ == visits_.size(); }
  bool recording() const noexcept { return recording_; }
  // The order the caller really took becomes the plan, for good.
  void adopt_recorded() {
    visits_ = std::move(recorded_);
    recorded_.clear();
    recording_ = false;
  }

 private:
  std::vector<Visit> visits_, recorded_;
  bool recording_ = false;
  std::size_t next_ = 0;
  std::uint64_t unplanned_ = 0;
};

}  // namespace spillway
