#include "swap/policy/weight_residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/seed.h"
#include "tests/swap/policy/obedient.h"

namespace spillway {
namespace {

using testing::Actions;
using testing::equal_blocks;
using testing::Kind;
using testing::Obedient;
using testing::Update;

TEST(WeightResidency, FetchesAheadInVisitOrderAsPlacesComeFree) {
  Obedient run(equal_blocks(4, 2));
  EXPECT_EQ(run.begin({0, 1, 2, 3}), (Actions{{Kind::kFetch, 0, 0}, {Kind::kFetch, 1, 1}}));
  EXPECT_EQ(run.acquire(0, 0), (Actions{{Kind::kWait, 0, 0}, {Kind::kLend, 0, 0}}));
  EXPECT_EQ(run.release(0), (Actions{{Kind::kFetch, 2, 0}}));
  EXPECT_EQ(run.acquire(1, 1), (Actions{{Kind::kWait, 1, 1}, {Kind::kLend, 1, 1}}));
  EXPECT_EQ(run.release(1), (Actions{{Kind::kFetch, 3, 1}}));
  EXPECT_FALSE(run.policy.all_acquired());
  run.acquire(2, 2);
  run.acquire(3, 3);
  EXPECT_TRUE(run.policy.all_acquired());
}

TEST(WeightResidency, TheUpdateBringsABlockItsFirstVisitAndLaterOnesFetchIt) {
  Obedient run(equal_blocks(2, 1));
  run.update.awaited = {0, 1};
  EXPECT_EQ(run.begin({0, 1, 0}), Actions{});
  EXPECT_EQ(run.acquire(0, 0), (Actions{{Kind::kUpdate, 0, 0}, {Kind::kLend, 0, 0}}));
  EXPECT_EQ(run.release(0), Actions{});
  run.updates_bring = false;
  EXPECT_EQ(run.acquire(1, 1),
            (Actions{{Kind::kUpdate, 1, 0}, {Kind::kFetch, 1, 0}, {Kind::kWait, 1, 0}, {Kind::kLend, 1, 0}}));
  EXPECT_EQ(run.release(0), (Actions{{Kind::kFetch, 0, 0}}));
}

TEST(WeightResidency, NothingIsFetchedWhileItsUpdateIsAwaitedHoweverFreeAPlaceIs) {
  Obedient run(equal_blocks(2, 2));
  run.update.awaited = {1};
  EXPECT_EQ(run.begin({0, 1}), (Actions{{Kind::kFetch, 0, 0}}));
  run.update.awaited.clear();
  EXPECT_EQ(run.policy.next(), WeightAction{});  // its visit was passed over
  EXPECT_EQ(run.acquire(0, 0), (Actions{{Kind::kWait, 0, 0}, {Kind::kLend, 0, 0}}));
  EXPECT_EQ(run.acquire(1, 1), (Actions{{Kind::kFetch, 1, 1}, {Kind::kWait, 1, 1}, {Kind::kLend, 1, 1}}));
}

TEST(WeightResidency, BlocksAreFetchedAheadUntilTheLimitIsReached) {
  for (const std::uint64_t limit : {0, 1, 100, 101, 200, 201, 1000}) {
    WeightResidencyOptions options = equal_blocks(3, 3);
    options.prefetch_bytes = limit;
    Obedient run(options);
    EXPECT_EQ(run.begin({0, 1, 2}).size(), std::min<std::uint64_t>((limit + 99) / 100, 3)) << limit;
  }
}

TEST(WeightResidency, WhatABlockThatIsRefusedWaitsForIsARelease) {
  Obedient run(equal_blocks(3, 2));
  run.begin({0, 1, 2});
  run.acquire(0, 0);
  run.acquire(1, 1);
  EXPECT_EQ(run.acquire(2, 2), (Actions{{Kind::kRefuse, 2, 0}}));
  EXPECT_EQ(run.release(0), Actions{});
  EXPECT_EQ(run.acquire(2, 2), (Actions{{Kind::kFetch, 2, 0}, {Kind::kWait, 2, 0}, {Kind::kLend, 2, 0}}));
}

TEST(WeightResidency, AnUnplannedBlockTakesThePlaceThatMattersLeast) {
  WeightResidencyOptions options = equal_blocks(5, 3);
  options.owners = {3, std::nullopt, std::nullopt};
  options.frozen = {0, 0, 0, 1, 0};
  Obedient run(options);
  EXPECT_EQ(run.begin({3, 0, 1}), (Actions{{Kind::kFetch, 3, 0}, {Kind::kFetch, 0, 1}, {Kind::kFetch, 1, 2}}));
  run.release(run.acquire(0, 1).back().place);
  // 3 would stay for good and 1 is on its way: 0 has been and gone.
  EXPECT_EQ(run.acquire(4), (Actions{{Kind::kFetch, 4, 1}, {Kind::kWait, 4, 1}, {Kind::kLend, 4, 1}}));
}

TEST(WeightResidency, FrozenBlocksInPlacesOfTheirOwnStayOrGoOnComing) {
  WeightResidencyOptions options = equal_blocks(2, 2);
  options.owners = {1, std::nullopt};
  options.frozen = {0, 1};
  Obedient run(options);
  EXPECT_EQ(run.begin({0, 1}), (Actions{{Kind::kFetch, 0, 1}, {Kind::kFetch, 1, 0}}));
  EXPECT_EQ(run.begin({0, 1}), (Actions{{Kind::kDrain, 0, 1}, {Kind::kFetch, 0, 1}}));
  EXPECT_EQ(run.acquire(1, 1), (Actions{{Kind::kWait, 1, 0}, {Kind::kLend, 1, 0}}));
  run.release(0);
  EXPECT_EQ(run.after({.kind = WeightEvent::kForget}), (Actions{{Kind::kDrain, 0, 1}}));
  EXPECT_EQ(run.begin({0, 1}), (Actions{{Kind::kFetch, 0, 1}, {Kind::kFetch, 1, 0}}));
}

TEST(WeightResidency, WhatFailedIsNotThere) {
  Obedient run(equal_blocks(2, 2));
  const std::vector<std::uint32_t> visits = {0, 1};
  run.tell({.kind = WeightEvent::kBegin, .visits = visits});
  EXPECT_EQ(run.policy.next(), (WeightAction{Kind::kFetch, 0, 0}));
  run.tell({.kind = WeightEvent::kFailed, .place = 0});
  EXPECT_EQ(run.acquire(1, 1), (Actions{{Kind::kFetch, 1, 1}, {Kind::kWait, 1, 1}, {Kind::kLend, 1, 1}}));
  run.tell({.kind = WeightEvent::kAcquire, .block = 0, .visit = 0});
  EXPECT_EQ(run.policy.next(), (WeightAction{Kind::kFetch, 0, 0}));
  EXPECT_EQ(run.policy.next(), (WeightAction{Kind::kWait, 0, 0}));
  run.tell({.kind = WeightEvent::kFailed, .place = 0});
  EXPECT_EQ(run.release(1), (Actions{}));  // and nobody waits for it any more
}

TEST(WeightResidency, WeightsAtHomeAreUpdatedThereAndNeverMove) {
  WeightResidencyOptions options = equal_blocks(2, 0);
  options.at_home = true;
  Obedient run(options);
  EXPECT_EQ(run.begin({0, 1, 0}), Actions{});
  EXPECT_EQ(run.acquire(1), (Actions{{Kind::kLend, 1, 1}}));
  run.update.under_way = true;
  // Another block's update may have written some of it, so each is asked for, awaited or not.
  EXPECT_EQ(run.acquire(0, 0), (Actions{{Kind::kUpdateAtHome, 0, 0}, {Kind::kLend, 0, 0}}));
  run.release(0);
  EXPECT_EQ(run.acquire(0, 2), (Actions{{Kind::kUpdateAtHome, 0, 0}, {Kind::kLend, 0, 0}}));
  run.update.under_way = false;
  EXPECT_EQ(run.acquire(0), (Actions{{Kind::kLend, 0, 0}}));
  EXPECT_EQ(run.policy.hits().visits, 0u);
  EXPECT_FALSE(run.policy.all_acquired());
}

// An engine and a caller that do anything they may: blocks are asked for in any order, leased twice, updated when it
// comes, and what is done for them may fail. Whatever happens, a lease is of the weights of this step.
class AnyRun {
 public:
  explicit AnyRun(std::mt19937_64& random) : random_(random), options_(any_options()), policy_(options_, update_) {
    places_.resize(policy_.places());
    for (std::uint32_t p = 0; options_.at_home && p < places_.size(); ++p) places_[p].block = p;
    versions_.resize(policy_.blocks(), 0);
    home_.resize(policy_.blocks(), 0);
  }

  void step() {
    begin();
    for (std::uint64_t calls = 2 * visits_.size(); calls > 0 && !::testing::Test::HasFailure(); --calls) {
      if (below(3) == 0) end_updates();
      leases_.empty() || below(5) > 1 ? acquire() : release(below(leases_.size()));
    }
    while (!leases_.empty()) release(leases_.size() - 1);
    if (below(20) == 0) {
      tell({.kind = WeightEvent::kForget});
      run();
      for (PlaceState& place : places_) {
        ASSERT_FALSE(place.coming);
        place.ahead = false;
        if (!options_.at_home) place.block.reset();
      }
    }
  }

  // Another policy that is told the same answers the same.
  void replay() const {
    Update update;
    WeightResidency policy(options_, update);
    for (const Entry& entry : entries_) {
      update = entry.update;
      if (entry.answer) {
        ASSERT_EQ(policy.next(), *entry.answer);
      } else {
        WeightEvent event = entry.event;
        event.visits = entry.visits;
        policy.tell(event);
      }
    }
  }

 private:
  struct PlaceState {
    std::optional<std::uint32_t> block;
    std::uint64_t version = 0;
    bool coming = false, ahead = false;
    std::uint32_t leases = 0;
  };
  struct Entry {
    WeightEvent event = {};
    std::vector<std::uint32_t> visits = {};
    std::optional<WeightAction> answer = {};
    Update update = {};
  };

  std::uint64_t below(std::uint64_t end) { return random_() % end; }

  WeightResidencyOptions any_options() {
    WeightResidencyOptions options{.block_bytes = {}, .place_bytes = {}};
    for (std::uint64_t blocks = 1 + below(7); blocks > 0; --blocks) options.block_bytes.push_back(1 + below(100));
    options.place_bytes.push_back(100);
    options.owners.emplace_back();
    for (std::uint64_t more = below(4); more > 0; --more) {
      options.place_bytes.push_back(1 + below(100));
      options.owners.emplace_back();
    }
    for (std::size_t b = 0; b < options.block_bytes.size(); ++b) options.frozen.push_back(below(3) == 0);
    if (below(2) == 0) {
      options.owners.emplace_back(static_cast<std::uint32_t>(below(options.block_bytes.size())));
      options.place_bytes.push_back(options.block_bytes[*options.owners.back()]);
    }
    if (below(2) == 0) options.reuse_bytes = below(300);
    if (below(2) == 0) options.prefetch_bytes = below(300);
    options.at_home = below(8) == 0;
    options.poison_released = !options.at_home && below(6) == 0;
    return options;
  }

  void tell(const WeightEvent& event) {
    entries_.push_back({.event = event, .visits = {event.visits.begin(), event.visits.end()}, .update = update_});
    policy_.tell(event);
  }

  // Some updates are made before the visits of their blocks, others by them. The visits are the same for some steps.
  void begin() {
    if (visits_.empty() || below(3) == 0) {
      visits_.resize(1 + below(20));
      for (std::uint32_t& block : visits_) block = static_cast<std::uint32_t>(below(policy_.blocks()));
    }
    next_visit_ = 0;
    update_ = {};
    update_.under_way = below(2) == 0;
    for (std::uint32_t b = 0; b < policy_.blocks(); ++b) {
      if (options_.frozen[b]) continue;
      ++versions_[b];
      if (update_.under_way && below(4) > 0) {
        update_.awaited.insert(b);
      } else {
        home_[b] = versions_[b];
      }
    }
    for (std::uint32_t p = 0; p < places_.size(); ++p) {
      const bool stays = options_.at_home || (places_[p].block && options_.owners[p] == places_[p].block &&
                                              options_.frozen[*places_[p].block]);
      if (!stays) places_[p].ahead = false;
    }
    tell({.kind = WeightEvent::kBegin, .visits = visits_});
    run();
  }

  void updated(std::uint32_t block) {
    home_[block] = versions_[block];
    update_.awaited.erase(block);
  }

  void end_updates() {
    const auto block = static_cast<std::uint32_t>(below(policy_.blocks()));
    if (!options_.frozen[block]) updated(block);
    if (below(8) > 0) return;
    for (std::uint32_t b = 0; b < policy_.blocks(); ++b) updated(b);
    update_.under_way = false;
  }

  void acquire() {
    std::optional<std::size_t> visit;
    std::uint32_t block = static_cast<std::uint32_t>(below(policy_.blocks()));
    if (next_visit_ < visits_.size() && below(6) > 0) {
      if (below(8) == 0) next_visit_ += below(visits_.size() - next_visit_);  // some are left out
      visit = next_visit_++;
      block = visits_[*visit];
    }
    tell({.kind = WeightEvent::kAcquire, .block = block, .visit = visit});
    wanted_ = block;
    run();
    ASSERT_FALSE(wanted_);  // lent, refused or failed
  }

  void release(std::size_t index) {
    const std::uint32_t place = leases_[index];
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(index));
    --places_[place].leases;
    tell({.kind = WeightEvent::kRelease, .place = place});
    run();
  }

  void run() {
    while (!::testing::Test::HasFailure()) {
      const WeightAction action = policy_.next();
      entries_.push_back({.answer = action, .update = update_});
      if (action.kind == Kind::kNothing) return;
      if (action.kind != Kind::kRefuse) {
        ASSERT_LT(action.place, places_.size());
      }
      act(action);
      if (action.kind == Kind::kRefuse) return;  // the caller gets an error, and nothing else is done
    }
  }

  bool fails(const WeightAction& action) {
    if (below(60) > 0) return false;
    places_[action.place] = {};
    wanted_.reset();
    tell({.kind = WeightEvent::kFailed, .place = action.place});
    return true;
  }

  void act(const WeightAction& action) {
    const auto& [kind, block, p] = action;
    switch (kind) {
      case Kind::kFetch: return fetch(action);
      case Kind::kUpdate: return update(action);
      case Kind::kUpdateAtHome:
        ASSERT_TRUE(options_.at_home && update_.under_way);
        ASSERT_EQ(wanted_, block);
        ASSERT_EQ(p, block);
        if (!options_.frozen[block]) updated(block);
        return tell({.kind = WeightEvent::kBrought, .block = block, .place = p});
      case Kind::kWait:
      case Kind::kDrain:
        ASSERT_TRUE(places_[p].coming);
        if (kind == Kind::kWait) {
          ASSERT_EQ(places_[p].block, wanted_);
          if (fails(action)) return;
        } else {
          places_[p].block.reset();
          places_[p].ahead = false;
        }
        places_[p].coming = false;
        return tell({.kind = WeightEvent::kArrived, .place = p});
      case Kind::kLend: return lend(action);
      case Kind::kRefuse:
        for (std::size_t i = 0; i < places_.size(); ++i) {
          ASSERT_TRUE(places_[i].leases > 0 || options_.place_bytes[i] < options_.block_bytes[block]);
        }
        return wanted_.reset();
      case Kind::kNothing: return;
    }
  }

  void expect_free(const WeightAction& action) {
    ASSERT_EQ(places_[action.place].leases, 0u);
    ASSERT_FALSE(places_[action.place].coming);
    ASSERT_LE(options_.block_bytes[action.block], options_.place_bytes[action.place]);
    ASSERT_FALSE(options_.at_home);
  }

  void fetch(const WeightAction& action) {
    const auto& [kind, block, p] = action;
    expect_free(action);
    ASSERT_EQ(home_[block], versions_[block]) << "what lies there is of the step before";
    std::uint64_t ahead = 0;
    for (const PlaceState& place : places_) {
      if (place.ahead && &place != &places_[p]) ahead += options_.block_bytes[*place.block];
    }
    ASSERT_TRUE(wanted_ || ahead < options_.prefetch_bytes);
    if (fails(action)) return;
    places_[p] = {.block = block, .version = home_[block], .coming = true, .ahead = !wanted_};
  }

  void update(const WeightAction& action) {
    const auto& [kind, block, p] = action;
    expect_free(action);
    ASSERT_EQ(wanted_, block);
    ASSERT_TRUE(update_.awaited.contains(block));
    if (fails(action)) return;
    updated(block);
    const bool brings = below(4) > 0;
    if (brings) places_[p] = {.block = block, .version = versions_[block]};
    tell({.kind = brings ? WeightEvent::kBrought : WeightEvent::kPassed, .block = block, .place = p});
  }

  void lend(const WeightAction& action) {
    const auto& [kind, block, p] = action;
    ASSERT_EQ(wanted_, block);
    PlaceState& place = places_[p];
    ASSERT_EQ(place.block, block);
    ASSERT_FALSE(place.coming);
    ASSERT_TRUE(options_.at_home || place.version == versions_[block]) << "weights of a step before";
    ASSERT_TRUE(!options_.at_home || !update_.under_way || home_[block] == versions_[block]);
    place.ahead = false;
    ++place.leases;
    leases_.push_back(p);
    wanted_.reset();
  }

  std::mt19937_64& random_;
  const WeightResidencyOptions options_;
  Update update_;
  WeightResidency policy_;
  std::vector<Entry> entries_;
  std::vector<PlaceState> places_;
  std::vector<std::uint64_t> versions_, home_;  // by block: of this step; where it lives
  std::vector<std::uint32_t> visits_, leases_;
  std::size_t next_visit_ = 0;
  std::optional<std::uint32_t> wanted_;
};

TEST(WeightResidency, WhateverHappensALeaseIsOfTheWeightsOfThisStep) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 3000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    AnyRun run(random);
    for (int step = 0; step < 6 && !HasFailure(); ++step) run.step();
    run.replay();
  }
}

}  // namespace
}  // namespace spillway
