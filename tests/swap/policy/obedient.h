// Whoever does what a WeightResidency answers, without fail.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <vector>

#include "swap/policy/weight_residency.h"

namespace spillway::testing {

using Kind = WeightAction::Kind;
using Actions = std::vector<WeightAction>;

inline WeightResidencyOptions equal_blocks(std::uint32_t blocks, std::uint32_t places) {
  return {.block_bytes = std::vector<std::uint64_t>(blocks, 100),
          .place_bytes = std::vector<std::uint64_t>(places, 100)};
}

// As the test says.
struct Update final : UpdateView {
  bool under_way = false;
  std::set<std::uint32_t> awaited;
  bool begun() const override { return under_way; }
  WeightsFrom weights_from(std::uint32_t block) const override {
    return awaited.contains(block) ? WeightsFrom::kUpdate : WeightsFrom::kNewest;
  }
  bool operator==(const Update& other) const { return under_way == other.under_way && awaited == other.awaited; }
};

// Tells a policy that all it asks for goes well, and keeps what it asked for.
struct Obedient {
  explicit Obedient(const WeightResidencyOptions& options) : policy(options, update) {}

  Update update;
  WeightResidency policy;
  bool updates_bring = true;

  Actions after(const WeightEvent& event) {
    tell(event);
    Actions actions;
    for (WeightAction action = policy.next(); action.kind != Kind::kNothing; action = policy.next()) {
      actions.push_back(action);
      const auto& [kind, block, place] = action;
      if (kind == Kind::kWait || kind == Kind::kDrain) tell({.kind = WeightEvent::kArrived, .place = place});
      if (kind == Kind::kUpdate || kind == Kind::kUpdateAtHome) {
        const bool brings = updates_bring || kind == Kind::kUpdateAtHome;
        update.awaited.erase(block);
        tell({.kind = brings ? WeightEvent::kBrought : WeightEvent::kPassed, .block = block, .place = place});
      }
    }
    return actions;
  }
  void tell(const WeightEvent& event) { policy.tell(event); }
  Actions begin(const std::vector<std::uint32_t>& visits) {
    return after({.kind = WeightEvent::kBegin, .visits = visits});
  }
  Actions begin(const std::vector<std::uint32_t>& visits, std::size_t pass_visits) {
    return after({.kind = WeightEvent::kBegin, .visits = visits, .pass_visits = pass_visits});
  }
  // Acquires and releases the planned visit.
  Actions visit(std::uint32_t block, std::size_t visit) {
    Actions all = acquire(block, visit);
    const auto lent = std::ranges::find(all, Kind::kLend, &WeightAction::kind);
    EXPECT_EQ(lent->block, block);
    const Actions released = release(lent->place);
    all.insert(all.end(), released.begin(), released.end());
    return all;
  }
  Actions acquire(std::uint32_t block, std::optional<std::size_t> visit = {}) {
    return after({.kind = WeightEvent::kAcquire, .block = block, .visit = visit});
  }
  Actions release(std::uint32_t place) { return after({.kind = WeightEvent::kRelease, .place = place}); }
};

}  // namespace spillway::testing
