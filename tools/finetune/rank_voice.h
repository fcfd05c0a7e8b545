// Who speaks where several processes do one thing: the first rank, for all of them. Of the others, warnings are heard
// that the first one does not have itself.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "spillway/log.h"
#include "tools/finetune/ranks.h"

namespace spillway::models::finetune {

class RankVoice {
 public:
  // Where there are several ranks: takes the log, and on all ranks but the first standard output, too.
  explicit RankVoice(const Ranks& ranks);
  ~RankVoice();
  RankVoice(const RankVoice&) = delete;
  RankVoice& operator=(const RankVoice&) = delete;

  // What was said so far. From then on warnings of other ranks are told as they come. Collective.
  void compare(Ranks& ranks);
  // Before something is printed: a launcher that is ending takes nothing any more, and must not hold up all ranks. What
  // nobody takes within a second goes nowhere from then on.
  void check_reader();
  // What a rank ends with. The first one's words are for all, where all end with it. Collective. Returns the exit code.
  int tell_failure(Ranks& ranks, const std::exception& error);

 private:
  void take(LogLevel level, std::string_view message);

  const std::uint32_t rank_;
  const bool alone_;
  std::mutex mutex_;  // guards what follows
  bool compared_ = false;
  std::vector<std::string> warnings_;  // until then
};

}  // namespace spillway::models::finetune
