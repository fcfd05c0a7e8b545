#include "swap/policy/run_stores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace spillway {
namespace {

constexpr RunId kOld{{1, 2}}, kNew{{3, 4}};
constexpr std::optional<RunId> kNothing;

// Calls each(digits) for every number of that many digits.
template <class Each>
void for_all(std::size_t digits, unsigned base, Each each) {
  std::vector<unsigned> digit(digits);
  while (true) {
    each(digit);
    std::size_t at = 0;
    while (at < digits && ++digit[at] == base) digit[at++] = 0;
    if (at == digits) return;
  }
}

bool has_run(const RankStores& stores, const RunId& run) { return stores.named == run || stores.waiting == run; }

// What the chosen names leave, as far as the ranks of `done` have come.
std::vector<RankStores> after(std::vector<RankStores> ranks, const RunChoice& choice, unsigned done) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if ((done >> rank & 1u) == 0) continue;
    if (choice.of[rank] == StoreChoice::kWaiting) ranks[rank].named = ranks[rank].waiting;
    ranks[rank].waiting.reset();
  }
  return ranks;
}

TEST(RunStores, ARunGoesOnWhichAllHaveAndOneThatHasItsNameComesFirst) {
  const std::optional<RunId> ids[] = {kNothing, kOld, kNew};
  for (std::size_t count = 1; count <= 4; ++count) {
    for_all(count, 9, [&](const std::vector<unsigned>& digit) {
      std::vector<RankStores> ranks;
      for (unsigned both : digit) ranks.push_back({ids[both % 3], ids[both / 3]});
      const RunChoice choice = choose_run(ranks);
      ASSERT_EQ(choice.of.size(), count);
      bool whole = false, whole_and_named = false;
      for (const RunId& run : {kOld, kNew}) {
        const bool all_have = std::ranges::all_of(ranks, [&](const RankStores& s) { return has_run(s, run); });
        whole |= all_have;
        whole_and_named |= all_have && std::ranges::any_of(ranks, [&](const RankStores& s) { return s.named == run; });
      }
      EXPECT_EQ(choice.whole, whole);
      EXPECT_TRUE(!choice.run || ranks[choice.first].named == choice.run || !whole_and_named);
      EXPECT_TRUE(!whole_and_named || std::ranges::count(choice.of, StoreChoice::kNamed) > 0);
      for (std::size_t rank = 0; rank < count; ++rank) {
        const RankStores& stores = ranks[rank];
        switch (choice.of[rank]) {
          case StoreChoice::kNamed: EXPECT_EQ(stores.named, choice.run); break;
          case StoreChoice::kWaiting:
            EXPECT_TRUE(choice.whole);
            EXPECT_EQ(stores.waiting, choice.run);
            EXPECT_NE(stores.named, choice.run);
            break;
          case StoreChoice::kMissing:
            EXPECT_FALSE(choice.whole);
            EXPECT_FALSE(stores.named);
            break;
          case StoreChoice::kOtherRun:
            EXPECT_FALSE(choice.whole);
            EXPECT_TRUE(stores.named);
            EXPECT_NE(stores.named, choice.run);
        }
      }
      if (!whole) return;
      // A crash among the renames: whoever comes next takes the same one.
      for (unsigned done = 0; done < 1u << count; ++done) {
        const RunChoice again = choose_run(after(ranks, choice, done));
        EXPECT_TRUE(again.whole);
        EXPECT_EQ(again.run, choice.run);
      }
    });
  }
}

// How far a rank has come with a new store.
enum Stage : unsigned { kNotBegun, kMade, kCommitted, kHasItsName, kStages };

TEST(RunStores, ACrashDuringAReplacementLeavesOneRunOrTheOther) {
  for (const std::optional<RunId>& before : {kNothing, std::optional(kOld)}) {
    for (std::size_t count = 2; count <= 4; ++count) {
      for_all(count, kStages, [&](const std::vector<unsigned>& stage) {
        const bool some_named = std::ranges::find(stage, kHasItsName) != stage.end();
        // No name is given before all have committed.
        if (some_named && std::ranges::min(stage) < kCommitted) return;
        std::vector<RankStores> ranks;
        for (unsigned of_rank : stage) {
          ranks.push_back(
              {of_rank == kHasItsName ? kNew : before, of_rank == kCommitted ? std::optional(kNew) : std::nullopt});
        }
        const RunChoice choice = choose_run(ranks);
        const bool all_committed = std::ranges::min(stage) >= kCommitted;
        const bool goes_on_anew = some_named || (all_committed && !before);
        EXPECT_EQ(choice.whole, goes_on_anew || before.has_value());
        EXPECT_EQ(choice.run, goes_on_anew ? kNew : before);
        for (std::size_t rank = 0; rank < count; ++rank) {
          EXPECT_TRUE(choice.of[rank] != StoreChoice::kWaiting || stage[rank] == kCommitted);
        }
      });
    }
  }
}

// A drive without room for both has lost its old one.
TEST(RunStores, OneThatWaitsOnAllRanksGoesOnWhereTheOldOneIsNotWhole) {
  const RankStores lost{kNothing, kNew}, both{kOld, kNew}, old{kOld, kNothing};
  const RunChoice choice = choose_run(std::vector{both, lost, both});
  EXPECT_TRUE(choice.whole);
  EXPECT_EQ(choice.run, kNew);
  EXPECT_EQ(choice.of, (std::vector(3, StoreChoice::kWaiting)));
  EXPECT_FALSE(choose_run(std::vector{both, lost, old}).whole);
}

TEST(RunStores, TheOthersAreComparedWithTheLowestRankThatHasAStore) {
  const RankStores none{}, old{kOld, kNothing}, other{kNew, kNothing};
  const std::vector<RankStores> missing_first{none, old, other, old};
  const RunChoice choice = choose_run(missing_first);
  EXPECT_EQ(choice.run, kOld);
  EXPECT_EQ(choice.first, 1u);
  EXPECT_EQ(choice.of,
            (std::vector{StoreChoice::kMissing, StoreChoice::kNamed, StoreChoice::kOtherRun, StoreChoice::kNamed}));
  EXPECT_EQ(choose_run(std::vector{none, none}).of, (std::vector{StoreChoice::kMissing, StoreChoice::kMissing}));
}

// Commit n is of step 10 n.
Commit commit_of(std::uint64_t n) { return {.sequence = n, .step = 10 * n}; }

TEST(RunStores, TheNewestCommitThatAllHaveCounts) {
  // Nothing; one of three commits; two of them.
  const RankCommits kinds[] = {{},
                               {commit_of(1), {}},
                               {commit_of(2), {}},
                               {commit_of(3), {}},
                               {commit_of(2), commit_of(1)},
                               {commit_of(3), commit_of(2)},
                               {commit_of(3), Commit{.sequence = 2, .step = 99}}};  // not the step that others have
  for (std::size_t count = 1; count <= 4; ++count) {
    for_all(count, std::size(kinds), [&](const std::vector<unsigned>& digit) {
      std::vector<RankCommits> ranks;
      for (unsigned kind : digit) ranks.push_back(kinds[kind]);
      std::optional<Commit> expected;
      for (const Commit& commit : {commit_of(1), commit_of(2), Commit{.sequence = 2, .step = 99}, commit_of(3)}) {
        if (std::ranges::all_of(ranks, [&](const RankCommits& r) { return r.last == commit || r.before == commit; }))
          expected = commit;
      }
      EXPECT_EQ(newest_common(ranks), expected);
    });
  }
}

// Every rank is at commit n or has made n + 1; who has not may have overwritten n - 1.
TEST(RunStores, ACrashBetweenTheCommitsOfRanksLosesNone) {
  for (std::size_t count = 2; count <= 4; ++count) {
    for_all(count, 2, [&](const std::vector<unsigned>& ahead) {
      std::vector<RankCommits> ranks;
      for (unsigned is : ahead) ranks.push_back({commit_of(5 + is), commit_of(4 + is)});
      const bool all = std::ranges::min(ahead) == 1;
      EXPECT_EQ(newest_common(ranks), commit_of(all ? 6 : 5));
      if (all) return;
      // Cut short again, while those that are ahead forget theirs.
      for_all(count, 2, [&](const std::vector<unsigned>& has_forgotten) {
        std::vector<RankCommits> left = ranks;
        for (std::size_t rank = 0; rank < count; ++rank) {
          if (ahead[rank] == 1 && has_forgotten[rank] == 1) left[rank] = {commit_of(5), {}};
        }
        EXPECT_EQ(newest_common(left), commit_of(5));
      });
    });
  }
}

void do_roll_back(RankCommits& rank, RollBack how) {
  if (how == RollBack::kTakesOlder)
    rank = {Commit{rank.last->sequence + kRollBackStride, rank.before->step}, rank.last};
  if (how == RollBack::kForgetsNewer) rank = {rank.before, {}};
}

TEST(RunStores, AllGoBackToTheCommitBeforeAndWhatWasCutShortIsFinished) {
  for (std::size_t count = 1; count <= 4; ++count) {
    const std::vector<RankCommits> ranks(count, {commit_of(5), commit_of(4)});
    const auto choice = choose_roll_back(ranks);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->step, 40u);
    for_all(count, 2, [&](const std::vector<unsigned>& done) {
      std::vector<RankCommits> left = ranks;
      for (std::size_t rank = 0; rank < count; ++rank) {
        if (done[rank] == 1) do_roll_back(left[rank], choice->of[rank]);
      }
      const bool all = std::ranges::min(done) == 1;
      EXPECT_EQ(newest_common(left)->step, all ? 40u : 50u) << "a run that goes on takes back what was cut short";
      const auto again = choose_roll_back(left);
      ASSERT_TRUE(again);
      EXPECT_EQ(again->step, all ? 50u : 40u) << "the second one takes the first one back";
      for (std::size_t rank = 0; rank < count; ++rank) do_roll_back(left[rank], again->of[rank]);
      for (const RankCommits& rank : left) EXPECT_EQ(rank.last, left[0].last);
      EXPECT_EQ(newest_common(left)->step, again->step);
    });
  }
}

TEST(RunStores, WhoIsAheadGoesBackToWhatAllHave) {
  const RankCommits ahead{commit_of(6), commit_of(5)}, at{commit_of(5), commit_of(4)};
  const auto choice = choose_roll_back(std::vector{at, ahead, at});
  ASSERT_TRUE(choice);
  EXPECT_EQ(choice->step, 50u);
  EXPECT_EQ(choice->of, (std::vector{RollBack::kStays, RollBack::kForgetsNewer, RollBack::kStays}));
}

// A snapshot that was loaded, say, whose step is the one that the others could go back to.
TEST(RunStores, ACommitOfAnOlderStepIsNotTakenForOneThatWasGoneBackTo) {
  const RankCommits loaded{Commit{.sequence = 6, .step = 40}, commit_of(5)}, at{commit_of(5), commit_of(4)};
  const auto choice = choose_roll_back(std::vector{loaded, at});
  ASSERT_TRUE(choice);
  EXPECT_EQ(choice->step, 50u);
  EXPECT_EQ(choice->of, (std::vector{RollBack::kForgetsNewer, RollBack::kStays}));
}

TEST(RunStores, ThereMayBeNoStepToGoBackTo) {
  const RankCommits both{commit_of(5), commit_of(4)}, one{commit_of(5), {}};
  EXPECT_FALSE(choose_roll_back(std::vector{both, one}));
  EXPECT_FALSE(choose_roll_back(std::vector{one, one}));
  EXPECT_FALSE(choose_roll_back(std::vector{both, RankCommits{commit_of(8), commit_of(7)}}));
  EXPECT_FALSE(choose_roll_back(std::vector{both, RankCommits{}}));
  EXPECT_FALSE(choose_roll_back(std::vector{both, RankCommits{commit_of(5), Commit{.sequence = 4, .step = 7}}}));
}

TEST(RunStores, StepsAreToldOfRanksInARow) {
  const RankCommits two{commit_of(5), commit_of(4)}, one{commit_of(3), {}};
  EXPECT_EQ(steps_text(std::vector{one, two, two, two, RankCommits{}}),
            "rank 0 has step 30, ranks 1 to 3 have steps 50 and 40, rank 4 has no step");
}

// ---- stores of any number of ranks, where they lie

PlacedStore placed(const RunId& run, std::uint32_t rank, std::uint32_t ranks, bool waiting) {
  PlacedStore store{.rank = {}, .waiting = waiting, .run = run, .says = {rank, ranks}};
  if (ranks > 1) store.rank = rank;
  return store;
}

std::vector<PlacedStore> placed_run(const RunId& run, std::uint32_t ranks, bool waiting = false) {
  std::vector<PlacedStore> stores;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) stores.push_back(placed(run, rank, ranks, waiting));
  return stores;
}

// What lies in one place under one name is one store.
void put(std::vector<PlacedStore>& stores, const PlacedStore& store) {
  std::erase_if(stores, [&](const PlacedStore& s) { return s.rank == store.rank && s.waiting == store.waiting; });
  stores.push_back(store);
}

TEST(PlacedRuns, OneOfAnyNumberOfRanksGoesOnAndOneThatIsNotWholeDoesNot) {
  EXPECT_TRUE(choose_placed_run({}).empty());
  for (std::uint32_t ranks = 1; ranks <= 4; ++ranks) {
    const std::vector<PlacedRun> wanted = {{kOld, ranks}};
    EXPECT_EQ(choose_placed_run(placed_run(kOld, ranks)), wanted);
    EXPECT_EQ(choose_placed_run(placed_run(kOld, ranks, true)), wanted);
    for (std::uint32_t gone = 0; gone < ranks; ++gone) {
      auto stores = placed_run(kOld, ranks);
      stores.erase(stores.begin() + gone);
      EXPECT_TRUE(choose_placed_run(stores).empty());
      stores.push_back(placed(kOld, gone, ranks, true));
      EXPECT_EQ(choose_placed_run(stores), wanted);
      stores.back().run = kNew;
      EXPECT_EQ(choose_placed_run(stores).empty(), ranks > 1) << "one alone is whole";
      stores.back() = placed(kOld, gone, ranks, false);
      stores.back().rank = ranks + 5;  // somebody has moved it
      EXPECT_TRUE(choose_placed_run(stores).empty());
    }
  }
}

// In every order in which ranks may come to give names, and old stores to be removed.
TEST(PlacedRuns, AChangeOfRanksIsAllOfOneRunOrAllOfTheOther) {
  for (std::uint32_t before = 1; before <= 4; ++before) {
    for (std::uint32_t after = 1; after <= 4; ++after) {
      const RunId next = successor_of(kOld, after);
      ASSERT_FALSE(next == kOld);
      const PlacedRun old_run{kOld, before}, new_run{next, after};
      // While new ones are made, some wait.
      for (unsigned waiting = 0; waiting < 1u << after; ++waiting) {
        auto stores = placed_run(kOld, before);
        for (std::uint32_t rank = 0; rank < after; ++rank)
          if (waiting >> rank & 1u) put(stores, placed(next, rank, after, true));
        EXPECT_EQ(choose_placed_run(stores), std::vector{old_run});
      }
      // Names are given, and what is in no new one's place is removed after the first of them.
      for (unsigned named = 1; named < 1u << after; ++named) {
        for (unsigned removed = 0; removed < 1u << before; ++removed) {
          auto stores = placed_run(kOld, before);
          std::erase_if(stores, [&](const PlacedStore& old) { return removed >> old.says.index & 1u; });
          for (std::uint32_t rank = 0; rank < after; ++rank)
            put(stores, placed(next, rank, after, (named >> rank & 1u) == 0));
          EXPECT_EQ(choose_placed_run(stores), std::vector{new_run}) << before << " to " << after;
        }
      }
    }
  }
}

TEST(PlacedRuns, TwoOfWhichNeitherFollowsTheOtherAreNotChosenBetween) {
  auto stores = placed_run(kOld, 1);
  for (const PlacedStore& store : placed_run(kNew, 2)) stores.push_back(store);
  EXPECT_EQ(choose_placed_run(stores).size(), 2u);
  for (PlacedStore& store : stores) store.waiting = store.says.count == 2;
  EXPECT_EQ(choose_placed_run(stores), (std::vector<PlacedRun>{{kOld, 1}}));
}

// A backup that somebody has put back, of the run before the last or the one before that.
TEST(PlacedRuns, ARunGoesOnBesideABackupOfTheOneBeforeItsPredecessor) {
  for (std::uint32_t between : {1u, 2u, 300u, 4096u}) {
    const RunId last = successor_of(successor_of(kOld, between), 2);
    auto stores = placed_run(kOld, 1);
    for (const PlacedStore& store : placed_run(last, 2)) stores.push_back(store);
    EXPECT_EQ(choose_placed_run(stores), (std::vector<PlacedRun>{{last, 2}})) << between;
    std::ranges::reverse(stores);
    EXPECT_EQ(choose_placed_run(stores), (std::vector<PlacedRun>{{last, 2}})) << between;
  }
  auto stores = placed_run(kOld, 1);
  for (const PlacedStore& store : placed_run(successor_of(successor_of(kNew, 3), 2), 2)) stores.push_back(store);
  EXPECT_EQ(choose_placed_run(stores).size(), 2u) << "of another's";
}

TEST(PlacedRuns, SuccessorsDifferByTheRunAndByTheNumberOfRanks) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> all;
  std::size_t count = 0;
  for (const RunId& run : {kOld, kNew, RunId{}}) {
    for (std::uint32_t ranks = 1; ranks <= 8; ++ranks, ++count) {
      const RunId next = successor_of(run, ranks);
      all.insert({next.word[0], next.word[1]});
      EXPECT_EQ(next, successor_of(run, ranks));
    }
  }
  EXPECT_EQ(all.size(), count);
}

}  // namespace
}  // namespace spillway
