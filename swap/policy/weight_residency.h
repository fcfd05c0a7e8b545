// The policy of weights: which place in HBM each visit's block uses, where its weights come from, and what is fetched
// ahead, in which order. It is told what happened and answers what to do next; whoever asks does it and reports how it
// went. Pure: no thread, file, clock or device. The engine does it with memory and streams (src/engine/weights), the
// schedule on a virtual clock (src/plan/schedule_program): no rule about prefetch is written anywhere else.
//
//   tell(what happened) ─► next() ─► do it ─► tell(how it went) ─► next() ─► … ─► kNothing
//
// The planned visits are a hint that makes blocks arrive in time; whatever the caller asks for is served, planned or
// not. Nothing is allocated but by kBegin, when its visits are others than before.
//
// Forward passes that follow one another without a step in between, as in an evaluation or when a text is generated
// token by token, keep what fits: a fixed set of blocks has places of its own from the second pass on.
// Read next: residency.h (how places are planned), update_queue.h (when a block's weights are readable).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "swap/policy/residency.h"
#include "swap/policy/update_queue.h"

namespace spillway {

struct WeightResidencyOptions {
  std::vector<std::uint64_t> block_bytes;  // of the blocks' weights
  std::vector<std::uint64_t> place_bytes;  // every block fits one of them
  // See ResidencyRules.
  std::vector<std::optional<std::uint32_t>> owners = {};
  std::uint64_t reuse_bytes = UINT64_MAX;
  std::vector<std::uint8_t> frozen = {};  // by block: no update changes it; empty: any may be changed
  // Another block is fetched ahead of its visit while fewer bytes than these are; 0: none ever is.
  std::uint64_t prefetch_bytes = UINT64_MAX;
  bool poison_released = false;  // a place loses its block with the last lease
  // The weights live in HBM: place p is block p's, whatever the rest says, and the block's update writes there.
  bool at_home = false;
};

struct WeightEvent {
  enum Kind : std::uint8_t {
    kBegin,    // of a step. `visits`: the blocks that will be visited from now on, in order. Everything that lies in a
               // place is stale, but for frozen blocks in places of their own: they stay, or go on coming
    kAgain,    // the visits begin anew, and no step has ended since kBegin: what lies in places is right, and what was
               // visited before is no part of the step. Not while something is leased
    kAcquire,  // the caller asks for the block. `visit`: which of the planned visits this is, if it is one
    kRelease,  // a lease of the place is over
    kBrought,  // kUpdate: the block's weights are on their way to the place
    kPassed,   // kUpdate: it is made, but they must be fetched
    kArrived,  // kWait, kDrain: the fetch is over
    kFailed,   // what was answered cannot be done, and whoever acquires has been told
    kForget,   // nothing that lies there, frozen or not, is the model's any more, and nothing is fetched before the
               // next kBegin. Not while something is leased
  };
  Kind kind = kBegin;
  std::uint32_t block = 0, place = 0;
  std::optional<std::size_t> visit = {};
  std::span<const std::uint32_t> visits = {};
  std::size_t pass_visits = 0;  // so many of them, the first, are the first forward pass
};

struct WeightAction {
  enum Kind : std::uint8_t {
    kNothing,       // until something else happens
    kDrain,         // wait for the fetch to the place: nobody has a use for what it brings
    kUpdate,        // make the block's update, and let it copy the weights to the place
    kUpdateAtHome,  // likewise where the place is the block's home: the update writes there anyway
    kFetch,         // start to fetch the block to the place
    kWait,          // for the fetch of the block to the place
    kLend,          // the block is there: the lease that was asked for begins
    kRefuse,        // every place that could hold the block is leased
  };
  Kind kind = kNothing;
  std::uint32_t block = 0, place = 0;
  bool operator==(const WeightAction&) const = default;
};

class WeightResidency {
 public:
  // `update`: what a block whose update is still to come has at home is of the step before.
  WeightResidency(WeightResidencyOptions options, const UpdateView& update);

  void tell(const WeightEvent& event);
  WeightAction next();

  std::size_t blocks() const noexcept { return options_.block_bytes.size(); }
  std::size_t places() const noexcept { return places_.size(); }
  bool holds(std::uint32_t place) const { return places_[place].block.has_value(); }  // some block
  std::uint32_t block(std::uint32_t place) const { return *places_[place].block; }
  bool leased(std::uint32_t place) const { return places_[place].leases > 0; }
  bool leased() const;
  // Every planned visit has been acquired: what fetches weights has nothing more to do in this step. Never where
  // nothing is fetched.
  bool all_acquired() const noexcept { return !options_.at_home && cursor_ == visits_.size(); }

  // Visits since kBegin or kAgain, and how many of them found the block where an earlier one had left it. Of blocks
  // that move.
  struct Hits {
    std::uint64_t visits = 0, hits = 0;
  };
  Hits hits() const noexcept { return hits_; }

 private:
  struct PlaceState {
    std::optional<std::uint32_t> block;
    std::uint32_t leases = 0;
    bool fetching = false;  // started and not yet waited for; without a block: for nobody
    bool ahead = false;     // brought for a visit that is still to come
    bool leaves = false;    // the block is given up with the last lease
  };
  // An acquire that is not served yet.
  struct Wanted {
    std::uint32_t block = 0;
    std::optional<std::size_t> visit = {};
    std::optional<std::uint32_t> place = {};
    bool hit = false;
    bool passed = false;  // by its update
  };

  void begin(std::span<const std::uint32_t> visits, std::size_t pass_visits);
  void begin_again();
  void leave_out(std::size_t second_visit);
  void release(PlaceState& place);
  WeightAction serve();
  WeightAction prefetch();
  WeightAction fetch(std::uint32_t place, std::uint32_t block);
  bool stays(std::uint32_t place) const;
  const std::vector<VisitPlace>& planned() const noexcept { return again_ ? passes_ : plan_; }
  bool wanted_before(std::size_t visit, std::uint32_t place) const;
  bool visited_before(std::size_t visit) const;
  bool taken_before(std::size_t visit, std::uint32_t place) const;
  std::uint64_t bytes_ahead() const;
  std::optional<std::uint32_t> find(std::uint32_t block) const;
  std::optional<std::uint32_t> place_for(const Wanted& wanted) const;
  void drop(PlaceState& place);
  bool awaited(std::uint32_t block) const { return update_.weights_from(block) == WeightsFrom::kUpdate; }

  WeightResidencyOptions options_;
  const UpdateView& update_;
  std::vector<PlaceState> places_;
  std::vector<std::uint32_t> visits_;
  std::vector<std::uint8_t> filled_;  // by place: as plan_ counts on
  std::vector<VisitPlace> plan_;
  std::vector<VisitPlace> passes_;  // of the first pass_visits_ visits, when they come over and over
  std::size_t pass_visits_ = 0;
  std::size_t left_out_ = 0;  // the last pass went from its first visit to this one: an encoder's were left out
  bool again_ = false;        // passes_ is what counts
  bool off_plan_ = false;     // plan_ counts, and passes before have left other blocks than it says
  std::size_t cursor_ = 0;    // visits before it have been acquired
  std::size_t fetched_ = 0;   // visits before it need no more fetching
  std::optional<Wanted> wanted_;
  Hits hits_;
};

}  // namespace spillway
