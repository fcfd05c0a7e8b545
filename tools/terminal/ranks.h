// The processes that mpirun started for one command: what they agree on.
//
// Calls are collective: all ranks make the same ones in the same order. What ends the communicator is thrown on each of
// them. A process alone agrees with itself: no call costs or changes anything there. Thread: one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "spillway/communicator.h"

namespace spillway::terminal {

// Where a rank keeps its part of what is in `path`: `path/rank3`, or `path` itself where there is one rank.
std::filesystem::path path_of_rank(const std::filesystem::path& path, std::uint32_t rank, std::uint32_t ranks);

// What all ranks must have alike, in words.
struct Subject {
  std::string name;  // `--data`
  std::string says;  // `11358 bytes, 0f12…`
};

class Ranks {
 public:
  explicit Ranks(Communicator& communicator) : communicator_(communicator) {}  // outlives this

  std::uint32_t rank() const { return communicator_.rank(); }
  std::uint32_t count() const { return communicator_.ranks(); }
  bool alone() const { return count() == 1; }
  bool first() const { return rank() == 0; }
  Communicator& communicator() const { return communicator_; }

  // Runs what may fail on one rank and not on another. Where it does, all of them throw what the lowest such rank has
  // to say. Returns the greatest of all ranks' values.
  std::uint64_t together(const std::function<void()>& alone, std::uint64_t value = 0);
  // Throws kInvalidArgument where a rank says something else than the first one, with the words of both.
  void agree(std::span<const Subject> subjects);

  // Whether all say the same.
  bool all_say(const std::string& text);
  // What that rank says, on every rank.
  std::string text_of(std::uint32_t from, const std::string& text);

  // For who ends with an error: whether all ranks do, so that the first one's words are enough. False where the others
  // cannot be asked any more.
  bool all_have_failed() noexcept;

  // Up to kMostScalars values of each rank become the fold of all ranks'.
  void fold(std::span<std::uint64_t> values, Fold fold);

 private:
  Communicator& communicator_;
};

}  // namespace spillway::terminal
