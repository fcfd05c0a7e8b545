// How many steps lie between two commits: as configured, or, when tiles in memory have to be written for each commit,
// the smallest number that makes commits cost at most 2 % of the time. It measures nothing and commits nothing: the
// engine tells it what a commit took (engine_commit.cc). Pure but for a line in the log.
#pragma once

#include <cstdint>
#include <optional>

namespace spillway {

// So many steps that a commit that makes one of them so much longer costs at most 2 % of the time.
std::uint32_t commit_interval(double commit_seconds, double step_seconds);

class CommitInterval {
 public:
  // `chooses`: by the first commit that is timed, unless `configured`.
  CommitInterval(std::optional<std::uint32_t> configured, bool chooses)
      : every_(configured.value_or(1)), chooses_(chooses && !configured) {}

  bool due(std::uint64_t step) const { return every_ > 0 && step % every_ == 0; }
  bool every_step() const { return every_ == 1; }
  bool never() const { return every_ == 0; }
  std::optional<std::uint32_t> chosen() const { return chooses_ ? std::nullopt : std::optional(every_); }
  // A commit took so long, of a step that took so long with it.
  void committed(double commit_seconds, double step_seconds);

 private:
  std::uint32_t every_;
  bool chooses_;
};

}  // namespace spillway
