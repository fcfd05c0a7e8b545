// AccumulatorResidency: whatever blocks are added to in whatever order, each finds the sums that it left, in a place
// that fits, and nothing moves that need not.
#include "swap/policy/accumulator_residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>

namespace spillway {
namespace {

constexpr std::uint32_t kBlocks = 3, kNobody = UINT32_MAX;

// Does what it says with additions counted for sums.
class Follower {
 public:
  explicit Follower(std::vector<std::uint64_t> place_bytes)
      : bytes_(std::move(place_bytes)), places_(bytes_.size()), residency_(bytes_, {kBytes.begin(), kBytes.end()}) {}

  // A visit of the block, in which others' sums leave or not; `completes`: it is the last one.
  void visit(std::uint32_t b, bool completes, bool others_leave) {
    const std::vector<PlaceState> before = places_;
    const auto arrival = residency_.bring(b);
    PlaceState& place = places_[arrival.place];
    ASSERT_GE(bytes_[arrival.place], kBytes[b]);
    expect_choice(before, arrival.place, b);
    if (arrival.leaves) send_home(*arrival.leaves, place);
    if (arrival.comes) {
      ASSERT_NE(place.block, b) << "what is there need not come";
      ASSERT_GT(wanted_[b], 0);
      place.sum = home_[b];
    } else if (wanted_[b] == 0) {
      place.sum = 0;  // the first of the step is no addition
    }
    place.block = b;
    place.turn = ++turn_;
    ASSERT_EQ(place.sum, wanted_[b]);
    for (std::uint32_t p = 0; others_leave && p < places_.size(); ++p) {
      const auto leaves = p == arrival.place ? std::nullopt : residency_.leave(p);
      if (leaves) send_home(*leaves, places_[p]);
    }
    const bool added_before = place.changed;
    ASSERT_EQ(residency_.add(b), added_before);
    ++place.sum;
    ++wanted_[b];
    place.changed = true;
    if (!completes) return;
    ASSERT_EQ(residency_.complete(b), arrival.place);
    wanted_[b] = 0;
    place.block = kNobody;
    place.changed = false;
  }

  void begin_step() {
    residency_.begin_step();
    wanted_ = {};
    for (PlaceState& place : places_) {
      place.block = kNobody;
      place.changed = false;
    }
  }

 private:
  static constexpr std::array<std::uint64_t, kBlocks> kBytes = {100, 50, 50};
  struct PlaceState {
    std::uint32_t block = kNobody;
    int sum = 0;
    bool changed = false;
    int turn = 0;
  };

  // Its own, else an empty one, else the one asked for longest ago.
  void expect_choice(const std::vector<PlaceState>& places, std::uint32_t chosen, std::uint32_t b) const {
    for (std::uint32_t p = 0; p < places.size(); ++p) {
      ASSERT_TRUE(places[p].block != b || chosen == p);
    }
    if (places[chosen].block == b || places[chosen].block == kNobody) return;
    for (std::uint32_t p = 0; p < places.size(); ++p) {
      if (bytes_[p] < kBytes[b]) continue;
      ASSERT_NE(places[p].block, kNobody) << "place " << p << " is empty";
      ASSERT_GE(places[p].turn, places[chosen].turn);
    }
  }

  void send_home(std::uint32_t b, PlaceState& place) {
    ASSERT_EQ(place.block, b);
    ASSERT_TRUE(place.changed) << "what is at home need not go there";
    home_[b] = place.sum;
    place.changed = false;
  }

  std::vector<std::uint64_t> bytes_;
  std::vector<PlaceState> places_;
  std::array<int, kBlocks> home_ = {}, wanted_ = {};
  int turn_ = 0;
  AccumulatorResidency residency_;
};

// All that a caller may do in six turns, five where everything is slow: visit one of three blocks, in the middle or for
// the last time, or begin anew.
TEST(AccumulatorResidency, EverySequenceFindsItsSums) {
  constexpr std::uint32_t kChoices = 2 * kBlocks + 1;
  const std::uint32_t turns = std::getenv("SPILLWAY_CASES") == nullptr ? 6 : 5;
  std::uint32_t sequences = 1;
  for (std::uint32_t i = 0; i < turns; ++i) sequences *= kChoices;
  const std::vector<std::vector<std::uint64_t>> layouts = {{100}, {100, 50}, {100, 100}, {100, 50, 50}, {50, 100, 100}};
  for (const auto& places : layouts) {
    for (const bool others_leave : {false, true}) {
      for (std::uint32_t sequence = 0; sequence < sequences; ++sequence) {
        Follower follower(places);
        std::uint32_t rest = sequence;
        for (std::uint32_t i = 0; i < turns; ++i, rest /= kChoices) {
          const std::uint32_t choice = rest % kChoices;
          if (choice == 2 * kBlocks) {
            follower.begin_step();
          } else {
            follower.visit(choice % kBlocks, choice >= kBlocks, others_leave);
          }
          if (HasFatalFailure()) FAIL() << "sequence " << sequence << ", " << places.size() << " places";
        }
      }
    }
  }
}

TEST(AccumulatorResidency, SumsThatWereNotAddedToDoNotGoHomeAgain) {
  AccumulatorResidency residency({100}, {100, 100});
  EXPECT_FALSE(residency.bring(0).comes);
  EXPECT_FALSE(residency.add(0));
  EXPECT_TRUE(residency.add(0));
  EXPECT_EQ(residency.bring(1).leaves, 0u);
  residency.add(1);
  const auto back = residency.bring(0);
  EXPECT_EQ(back.leaves, 1u);
  EXPECT_TRUE(back.comes);
  EXPECT_EQ(residency.bring(1).leaves, std::nullopt);
}

}  // namespace
}  // namespace spillway
