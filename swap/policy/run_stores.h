// What the stores of all ranks are together, and what each rank does so that they go on as one run. Every rank brings
// what it has found into the same table, so that all come to the same answers. Pure.
//
// The run. A new store waits under another name until all ranks' are committed; only then does each get its name. So
// one that has its name proves that all are complete:
//
//            its name   waiting        its name   waiting        its name   waiting
//   rank 0   old        new            new        -              new        -
//   rank 1   old        new            old        new            old        -
//            the old run goes on       the new one goes on       neither is whole: refused
//
// Where no store that has its name is of a whole run, for there was none, or some rank's drive had no room for both,
// one that waits on all ranks goes on.
//
// The commit. Ranks count their commits alike, and a store has its last two. None overwrites the one before the last
// before it knows that all have the last: who was killed in between is one ahead, and takes that back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace spillway {

// Random; the same in the stores of all ranks that train one model.
struct RunId {
  std::uint64_t word[2] = {};
  bool operator==(const RunId&) const = default;
};

// What a rank has where its store lies: one that has its name, and one that is committed and waits for it.
struct RankStores {
  std::optional<RunId> named, waiting;
};

enum class StoreChoice : std::uint8_t {
  kNamed,    // it goes on as it is; one that waits is of a run that never was
  kWaiting,  // it gets its name
  kMissing,
  kOtherRun,
};

struct RunChoice {
  std::vector<StoreChoice> of;  // by rank; of a run that goes on kNamed or kWaiting
  // Where the run goes on. Else of the lowest rank that has a store, which the others are compared with.
  std::optional<RunId> run;
  std::uint32_t first = 0;  // the lowest rank that has it, by its name where some rank's has one
  bool whole = false;       // it goes on
};
RunChoice choose_run(std::span<const RankStores> ranks);

struct Commit {
  std::uint64_t sequence = 0;  // commits so far
  std::uint64_t step = 0;
  bool operator==(const Commit&) const = default;
};

// The two that a store has; `before` is older.
struct RankCommits {
  std::optional<Commit> last, before;
};

// The newest commit that all ranks have. Who has a newer one goes back to it: it is that rank's `before`.
std::optional<Commit> newest_common(std::span<const RankCommits> ranks);

// A step that is gone back to on purpose becomes a commit of its own, which counts on by so many. It is odd, for
// records alternate, and the newer step's stays; more than one, so that who did it before a crash is known from one
// that has committed and is ahead.
inline constexpr std::uint64_t kRollBackStride = 3;

enum class RollBack : std::uint8_t {
  kStays,
  kForgetsNewer,  // its newest commit is one that not all have
  kTakesOlder,    // `before` becomes the last commit
};
struct RollBackChoice {
  std::uint64_t step = 0;  // of all of them afterwards
  std::vector<RollBack> of;
};
// From the newest common commit to the one before; of ranks that do not stand at one commit, all to what they have in
// common; what was cut short is finished. Nothing: they have no such step.
std::optional<RollBackChoice> choose_roll_back(std::span<const RankCommits> ranks);

// `rank 0 has steps 5 and 4, ranks 1 to 3 have steps 3 and 2`
std::string steps_text(std::span<const RankCommits> ranks);

}  // namespace spillway
