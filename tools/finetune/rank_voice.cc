#include "tools/finetune/rank_voice.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "tools/terminal/remedies.h"
#include "tools/terminal/tell.h"

namespace spillway::models::finetune {
namespace {

// As the first rank says it: of places that each has for itself.
std::string as_of_first(std::string_view text, std::uint32_t rank) {
  const std::string own = fmt::format("/rank{}", rank);
  std::string said;
  for (std::size_t at; (at = text.find(own)) != text.npos; text.remove_prefix(at + own.size())) {
    said += fmt::format("{}/rank0", text.substr(0, at));
  }
  return said.append(text);
}

void tell(std::uint32_t rank, std::string_view message) {
  const std::string who = rank == 0 ? "" : fmt::format("rank {}: ", rank);
  terminal::tell(stderr, "spillway: {}{}{}\n", who, message.starts_with(": ") ? "\"\"" : "", message);
}

void print_nowhere() {
  const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere < 0) return;
  ::dup2(nowhere, STDOUT_FILENO);
  ::close(nowhere);
}

}  // namespace

RankVoice::RankVoice(const Ranks& ranks) : rank_(ranks.rank()), alone_(ranks.alone()) {
  if (alone_) return;
  set_log_sink([this](LogLevel level, std::string_view message) { take(level, message); });
  if (!ranks.first()) print_nowhere();
}

RankVoice::~RankVoice() {
  if (alone_) return;
  set_log_sink([rank = rank_](LogLevel level, std::string_view message) {
    if (rank == 0 || level == LogLevel::kWarning) tell(rank, message);
  });
}

void RankVoice::take(LogLevel level, std::string_view message) {
  const std::lock_guard lock(mutex_);
  if (level == LogLevel::kWarning && !compared_) warnings_.emplace_back(message);
  if (rank_ == 0 || (level == LogLevel::kWarning && compared_)) tell(rank_, message);
}

void RankVoice::compare(Ranks& ranks) {
  if (ranks.alone()) return;
  std::vector<std::string> own;
  {
    const std::lock_guard lock(mutex_);
    own = std::exchange(warnings_, {});
    compared_ = true;
  }
  std::string lines;
  for (const std::string& line : own) lines += line + '\n';
  // With all ranks of one kind of machine nothing is sent.
  const bool as_first = ranks.all_say(as_of_first(lines, ranks.rank()));
  for (std::uint32_t rank = 1; !as_first && rank < ranks.count(); ++rank) {
    std::string theirs = ranks.text_of(rank, lines);
    if (!ranks.first()) continue;
    for (std::size_t end; (end = theirs.find('\n')) != theirs.npos; theirs.erase(0, end + 1)) {
      const std::string line = theirs.substr(0, end);
      if (std::ranges::find(own, as_of_first(line, rank)) == own.end()) tell(rank, line);
    }
  }
}

void RankVoice::check_reader() {
  constexpr int kPatienceMs = 1000;
  if (alone_ || rank_ != 0) return;
  pollfd output{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  if (::poll(&output, 1, kPatienceMs) == 0) print_nowhere();
}

int RankVoice::tell_failure(Ranks& ranks, const std::exception& error) {
  if (ranks.first()) tell(0, terminal::message_of(error));
  const bool all = ranks.all_have_failed();
  if (!ranks.first() && !all) tell(ranks.rank(), terminal::message_of(error));
  return 1;
}

}  // namespace spillway::models::finetune
