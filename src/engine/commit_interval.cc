#include "src/engine/commit_interval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "spillway/log.h"

namespace spillway {
namespace {

constexpr double kCommitShare = 0.02;  // of a step: what commits of resident tiles may cost on average

double without_commit(double commit_seconds, double step_seconds) {
  return std::max(step_seconds - commit_seconds, 1e-3);
}

}  // namespace

std::uint32_t commit_interval(double commit_seconds, double step_seconds) {
  // A commit every n steps adds commit / n to each of them: n is the smallest for which that is at most the share.
  const double share = commit_seconds / (kCommitShare * without_commit(commit_seconds, step_seconds));
  return static_cast<std::uint32_t>(std::clamp(std::ceil(share), 1.0, 1000.0));
}

void CommitInterval::committed(double commit_seconds, double step_seconds) {
  if (!chooses_) return;
  // Once, by the first commit that was timed.
  chooses_ = false;
  const double without = without_commit(commit_seconds, step_seconds);
  every_ = commit_interval(commit_seconds, step_seconds);
  log(LogLevel::kInfo, fmt::format("commit_every {}: a commit of the tiles in memory takes {:.2f} s, a step {:.2f} s; "
                                   "a crash loses at most {} steps",
                                   every_, commit_seconds, without, every_));
}

}  // namespace spillway
