#include "tools/terminal/ranks.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>

#include "spillway/error.h"
#include "spillway/rank_directory.h"
#include "tools/terminal/remedies.h"

namespace spillway::terminal {
namespace {

// In the place of a block: what is agreed on here is for none.
constexpr std::int32_t kAgreed = -2, kEnding = -3;

std::uint64_t hash_of(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

// A code and a message as one text.
std::string text_of_error(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return static_cast<char>(error.code()) + message_of(error);
  } catch (const std::exception& error) {
    return static_cast<char>(Code::kIo) + std::string(error.what());
  }
}

}  // namespace

std::filesystem::path path_of_rank(const std::filesystem::path& path, std::uint32_t rank, std::uint32_t ranks) {
  return ranks == 1 ? path : directory_of_rank(path, rank);
}

void Ranks::fold(std::span<std::uint64_t> values, Fold fold) { communicator_.all_reduce_now(values, fold, kAgreed); }

bool Ranks::all_say(const std::string& text) {
  std::uint64_t least = hash_of(text), greatest = least;
  fold({&least, 1}, Fold::kMin);
  fold({&greatest, 1}, Fold::kMax);
  return least == greatest;
}

// As much as an all_reduce takes at a time, to which the others add nothing.
std::string Ranks::text_of(std::uint32_t from, const std::string& text) {
  std::uint64_t bytes = rank() == from ? text.size() : 0;
  fold({&bytes, 1}, Fold::kMax);
  std::string told(rank() == from ? text : std::string(bytes, '\0'));
  std::array<std::uint64_t, kMostScalars> words;
  for (std::size_t at = 0; at < bytes; at += sizeof words) {
    words.fill(0);
    const std::size_t piece = std::min(sizeof words, static_cast<std::size_t>(bytes) - at);
    std::memcpy(words.data(), told.data() + at, piece);
    fold(words, Fold::kOr);
    std::memcpy(told.data() + at, words.data(), piece);
  }
  return told;
}

std::uint64_t Ranks::together(const std::function<void()>& alone, std::uint64_t value) {
  if (this->alone()) {
    alone();
    return value;
  }
  std::exception_ptr failure;
  try {
    alone();
  } catch (...) {
    failure = std::current_exception();
  }
  std::uint64_t words[] = {failure ? count() - rank() : 0, value};
  fold(words, Fold::kMax);
  if (words[0] == 0) return words[1];
  const auto lowest = static_cast<std::uint32_t>(count() - words[0]);
  const bool ours = lowest == rank();
  const std::string text = text_of(lowest, ours ? text_of_error(failure) : "");
  if (ours && first()) std::rethrow_exception(failure);
  throw Error(static_cast<Code>(text[0]),
              {.object = fmt::format("rank {}", lowest), .happened = text.substr(1), .errno_value = 0, .hint = ""});
}

void Ranks::agree(std::span<const Subject> subjects) {
  if (alone()) return;
  for (const Subject& subject : subjects) {
    if (all_say(subject.says)) continue;
    const std::string firsts = text_of(0, subject.says);
    std::uint64_t other = firsts == subject.says ? count() : rank();
    fold({&other, 1}, Fold::kMin);
    const std::string others = text_of(static_cast<std::uint32_t>(other), subject.says);
    throw Error(Code::kInvalidArgument, {.object = subject.name,
                                         .happened = fmt::format("{} on rank 0, {} on rank {}", firsts, others, other),
                                         .errno_value = 0,
                                         .hint = "start all ranks with the same command, on the same files"});
  }
}

bool Ranks::all_have_failed() noexcept {
  try {
    communicator_.note_ending(true);
    std::uint64_t nothing = 0;
    communicator_.all_reduce_now({&nothing, 1}, Fold::kMax, kEnding);
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace spillway::terminal
