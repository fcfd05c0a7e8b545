#include "src/comm/last_words.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace spillway {
namespace {

// The most telling first: a rank that others miss may itself say what happened to it.
int weight_of(const Word& word) {
  if (word.what == Word::What::kLeft) return 0;
  switch (word.reason) {
    case Word::Reason::kLibrary: return 4;
    case Word::Reason::kDiffer: return 3;
    case Word::Reason::kLeft: return 2;
    case Word::Reason::kNoProgress: return 1;
    case Word::Reason::kTold: break;
  }
  return -1;
}

// `rank 2 (node1)`, `ranks 2 and 3 (node1)`, `ranks 2 to 9 (node1, node2)`: who is missed at once is often all of a
// host.
std::string named(std::span<const std::uint32_t> ranks, std::span<const std::string> hosts) {
  constexpr std::size_t kShown = 4;
  std::vector<std::string> theirs;
  for (const std::uint32_t rank : ranks) {
    if (!hosts[rank].empty() && std::ranges::find(theirs, hosts[rank]) == theirs.end()) theirs.push_back(hosts[rank]);
  }
  if (theirs.empty()) return ranks_text(ranks);
  std::string text = ranks_text(ranks) + " (" + theirs[0];
  for (std::size_t i = 1; i < std::min(theirs.size(), kShown); ++i) text += ", " + theirs[i];
  return text + (theirs.size() > kShown ? ", …)" : ")");
}

std::string no_progress(const Ending& ending, const Word& cause) {
  std::vector<std::uint32_t> silent, at_work;
  std::string behind;
  for (std::uint32_t rank = 0; rank < ending.last_words.size(); ++rank) {
    const Word* last = ending.last_words[rank];
    if (last == nullptr) {
      silent.push_back(rank);
    } else if (last->number <= cause.failed && last->at_work) {
      at_work.push_back(rank);
    } else if (last->number <= cause.failed) {
      behind += fmt::format("{}rank {}{} has not come to it", behind.empty() ? "" : ", ", rank,
                            rank == ending.rank ? ", this one," : "");
      // Numbers begin with the opening's.
      if (last->number > 1) behind += fmt::format(" (its last one is {})", last->number - 1);
    }
  }
  const std::string text = fmt::format("no progress in {:g} s: ", ending.patience_seconds);
  if (!silent.empty()) {  // whoever is behind waits for these, too
    return text + fmt::format("{} {} not answer", named(silent, ending.hosts), silent.size() == 1 ? "does" : "do");
  }
  if (behind.empty() && at_work.empty())
    return text + "all ranks have entered it and answer, but its data does not arrive";
  if (at_work.empty()) return text + behind;
  const std::string them = fmt::format("{} {} at work", ranks_text(at_work), at_work.size() == 1 ? "is" : "are");
  return text + behind + (behind.empty() ? "" : "; ") + them;
}

bool ends(const Word* word) { return word != nullptr && word->ending; }

// That some end while others call something.
Error error_of_early_end(const Ending& ending, const Word& others_call) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < ending.announced.size(); ++rank) {
    if (ends(ending.announced[rank])) ranks.push_back(rank);
  }
  const bool itself = std::ranges::find(ranks, ending.rank) != ranks.end();
  const std::string them = named(ranks, ending.hosts);
  return Error(Code::kIo, {numbered_name_of(others_call),
                           itself ? "this rank ends before it"
                                  : fmt::format("{} {} before it", them, ranks.size() == 1 ? "ends" : "end"),
                           0,
                           itself ? "look at what ended it, and start all ranks again"
                                  : "that rank's own messages say why; start all ranks again"});
}

std::string what_differs(const Ending& ending) {
  std::vector<std::uint32_t> absent;
  for (std::uint32_t rank = 0; rank < ending.announced.size(); ++rank) {
    if (ending.announced[rank] == nullptr) absent.push_back(rank);
  }
  std::string text = "the ranks do not agree: " + differences(ending.announced);
  if (!absent.empty()) {
    text += fmt::format("; {} {} not come to it", ranks_text(absent), absent.size() == 1 ? "has" : "have");
  }
  return text;
}

}  // namespace

const Word& cause_of(std::span<const Word* const> last_words) {
  const Word* cause = nullptr;
  for (const Word* word : last_words) {
    if (word != nullptr && (cause == nullptr || weight_of(*word) > weight_of(*cause))) cause = word;
  }
  SPILLWAY_CHECK(cause != nullptr, "this rank has a last word, too");
  return *cause;
}

Error error_of(const Ending& ending) {
  const Word& cause = cause_of(ending.last_words);
  Word failed = cause;                          // for its name
  if (cause.reason == Word::Reason::kDiffer) {  // then it has several, and each rank tells the same one
    const auto first = std::ranges::find_if(ending.announced, [](const Word* word) { return word && !ends(word); });
    if (first != ending.announced.end()) failed = **first;
    if (first != ending.announced.end() && std::ranges::any_of(ending.announced, ends))
      return error_of_early_end(ending, failed);
  }
  failed.number = cause.failed;
  ErrorParts parts{.object = numbered_name_of(failed), .happened = {}, .errno_value = 0, .hint = {}};
  switch (cause.reason) {
    case Word::Reason::kDiffer:
      parts.happened = what_differs(ending);
      parts.hint = cause.kind == CollectiveKind::kOpen
                       ? "run one version of Spillway with the same communicator options on every rank"
                       : "run the same program with the same configuration, model and data on every rank";
      return Error(Code::kInvalidArgument, parts);
    case Word::Reason::kLibrary:
      parts.happened = cause.text();
      parts.hint = "look at that rank and at the network, and start all ranks again";
      break;
    case Word::Reason::kLeft:
      parts.happened = cause.text();
      parts.hint = "that rank's own messages say why; start all ranks again";
      break;
    default:
      parts.happened = no_progress(ending, cause);
      parts.hint = "look at what ended or stopped them, and at the network, and start all ranks again";
  }
  return Error(Code::kIo, parts);
}

Error error_of_hanging(const Collective& call, std::uint64_t number, const std::string& library,
                       double waited_seconds) {
  return Error(Code::kIo,
               {numbered_name_of(word_of(call, number)),
                fmt::format("a call of {} has not come back in {:g} s, as when a connection to another rank breaks",
                            library, waited_seconds),
                0, "look at what ended other ranks, and at the network, and start all ranks again"});
}

std::string lost_at_the_end(std::span<const std::uint32_t> silent, std::span<const std::string> hosts,
                            double patience_seconds) {
  return fmt::format(
      "communicator: as this rank leaves, {} {} not answer in {:g} s; look at what ended or stopped them, "
      "and at the network",
      named(silent, hosts), silent.size() == 1 ? "does" : "do", patience_seconds);
}

}  // namespace spillway
