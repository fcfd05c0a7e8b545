// What the stores of all ranks are together, and what each rank does so that they go on as one run. Every rank brings
// what it has found into the same table, so that all come to the same answers. Pure: files are looked at, named and
// removed by src/engine/rank_stores and TileStore.
//
// The run. A new store waits under another name until all ranks' are committed; only then does each get its name. So a
// store that has its name proves that all are complete:
//
//            its name   waiting        its name   waiting        its name   waiting
//   rank 0   old        new            new        -              new        -
//   rank 1   old        new            old        new            old        -
//            the old run goes on       the new one goes on       neither is whole: refused
//
// Where no store that has its name belongs to a whole run (there was none, or some rank's drive had no room for both),
// a run that waits on all ranks goes on.
//
// Another number of ranks. The stores of such a run lie elsewhere, some of them or all: one rank's in a directory,
// those of several below it. So everything that lies there is looked at together. A run that continues the work of
// another one on another number of ranks has an id made from the old one's, which shows that it takes its place:
//
//            its name   waiting        its name   waiting        its name   waiting
//   alone    old        -              old        -              old        -
//   rank 0   -          new            new        -              new        -
//   rank 1   -          new            -          new            new        -
//            the old run goes on       the new one goes on       the new one goes on, and the old one is removed
//
// The commit. Ranks count their commits alike, and a store has its last two. No rank overwrites the commit before the
// last one before it knows that all ranks have the last: a rank killed in between is one commit ahead, and takes it
// back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "swap/rank.h"

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

// A store that somebody has found in the directories of a run, or below them as that of a rank.
struct PlacedStore {
  std::optional<std::uint32_t>
      rank;              // that it lies as; nothing: in the directories themselves, as a run of one rank has it
  bool waiting = false;  // committed, and without its name; else it has its name
  RunId run;
  Rank says;  // whose it says that it is
  bool operator==(const PlacedStore&) const = default;
};

struct PlacedRun {
  RunId run;
  std::uint32_t ranks = 1;
  bool operator==(const PlacedRun&) const = default;
};
// The run that goes on: the one that is whole, each store in its place, and has a store with its name; without such a
// one, the one that waits as a whole. More than one: neither is the other's successor. Empty: there is none.
std::vector<PlacedRun> choose_placed_run(std::span<const PlacedStore> stores);

// The id of the run that goes on with another one's work on so many ranks.
RunId successor_of(const RunId& run, std::uint32_t ranks);

struct Commit {
  std::uint64_t sequence = 0;  // commits so far
  std::uint64_t step = 0;
  bool operator==(const Commit&) const = default;
};

// The two that a store has; `before` is older.
struct RankCommits {
  std::optional<Commit> last, before;
};

// The newest commit that all ranks have. A rank that has a newer one goes back to it: it is that rank's `before`.
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
