#include "src/commit_interval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "spillway/log.h"

namespace spillway {
namespace {

constexpr double kCommitShare = 0.02;  // of a step: what commits of resident tiles may cost on average

}  // namespace

void CommitInterval::committed(double commit_seconds, double step_seconds) {
  if (!chooses_) return;
  chooses_ = false;
  const double without = std::max(step_seconds - commit_seconds, 1e-3);
  every_ = static_cast<std::uint32_t>(std::clamp(std::ceil(commit_seconds / (kCommitShare * without)), 1.0, 1000.0));
  log(LogLevel::kInfo, fmt::format("commit_every {}: a commit of the tiles in memory takes {:.2f} s, a step {:.2f} s; "
                                   "a crash loses at most {} steps",
                                   every_, commit_seconds, without, every_));
}

}  // namespace spillway
