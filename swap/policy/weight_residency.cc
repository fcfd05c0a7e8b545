#include "swap/policy/weight_residency.h"

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "swap/policy/pass_places.h"

namespace spillway {

WeightResidency::WeightResidency(WeightResidencyOptions options, const UpdateView& update)
    : options_(std::move(options)), update_(update) {
  if (options_.at_home) {
    options_.place_bytes = options_.block_bytes;
    options_.owners.clear();
    options_.poison_released = false;
    for (std::uint32_t b = 0; b < blocks(); ++b) options_.owners.emplace_back(b);
  }
  places_.resize(options_.place_bytes.size());
  filled_.resize(places_.size());
  for (std::uint32_t p = 0; options_.at_home && p < places_.size(); ++p) places_[p].block = p;
}

void WeightResidency::tell(const WeightEvent& event) {
  switch (event.kind) {
    case WeightEvent::kBegin: return begin(event.visits, event.pass_visits);
    case WeightEvent::kAgain: return begin_again();
    case WeightEvent::kAcquire:
      if (event.visit) {
        if (*event.visit >= pass_visits_) off_plan_ |= std::exchange(again_, false);  // a backward pass: it is a step
        if (again_ && cursor_ == 1) leave_out(*event.visit);
        cursor_ = *event.visit + 1;
        fetched_ = std::max(fetched_, cursor_);
      }
      wanted_ = Wanted{.block = event.block, .visit = event.visit};
      return;
    case WeightEvent::kRelease: return release(places_[event.place]);
    case WeightEvent::kBrought: places_[event.place].block = event.block; return;
    case WeightEvent::kPassed: wanted_->passed = true; return;
    case WeightEvent::kArrived: places_[event.place].fetching = false; return;
    case WeightEvent::kFailed:
      drop(places_[event.place]);
      places_[event.place].fetching = false;
      wanted_.reset();
      return;
    case WeightEvent::kForget:
      for (PlaceState& place : places_) drop(place);
      fetched_ = visits_.size();
      return;
  }
}

void WeightResidency::begin(std::span<const std::uint32_t> visits, std::size_t pass_visits) {
  bool same = std::ranges::equal(visits_, visits) && pass_visits_ == pass_visits;
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    SPILLWAY_CHECK(places_[p].leases == 0, "no lease outlives its step");
    const std::uint8_t stays = this->stays(p);
    if (stays == 0) drop(places_[p]);
    same &= std::exchange(filled_[p], stays) == stays;
  }
  hits_ = {};
  if (!same) {
    visits_.assign(visits.begin(), visits.end());
    plan_ = assign_places(visits_, options_.block_bytes, options_.place_bytes,
                          {.owners = options_.owners, .reuse_bytes = options_.reuse_bytes, .filled = filled_});
    pass_visits_ = pass_visits;
    const auto pass = std::span(visits_).first(pass_visits_);
    ResidencyRules rules{.owners = options_.owners, .reuse_bytes = options_.reuse_bytes};
    const auto owners = owners_in_passes(pass, options_.block_bytes, options_.place_bytes, rules);
    rules.owners = owners;
    passes_ = assign_places(pass, options_.block_bytes, options_.place_bytes, rules);
  }
  again_ = off_plan_ = false;
  cursor_ = fetched_ = left_out_ = 0;
  wanted_.reset();
}

// What is on its way for a backward pass that did not come may be what the next pass keeps.
void WeightResidency::begin_again() {
  for (PlaceState& place : places_) {
    SPILLWAY_CHECK(place.leases == 0, "no lease outlives its pass");
    place.ahead = false;
  }
  hits_ = {};
  again_ = true;
  cursor_ = 0;
  fetched_ = left_out_;
  wanted_.reset();
}

// A decoder alone makes the tokens of a text that its encoder has read: nothing is fetched for visits that do not come.
void WeightResidency::leave_out(std::size_t second_visit) {
  if (second_visit < left_out_) fetched_ = second_visit;  // they come again
  left_out_ = second_visit > 1 ? second_visit : 0;
}

// What lies there, or is on its way, is right in the next step too.
bool WeightResidency::stays(std::uint32_t place) const {
  if (options_.at_home) return true;
  const auto& block = places_[place].block;
  return block && !options_.owners.empty() && options_.owners[place] == block && !options_.frozen.empty() &&
         options_.frozen[*block] != 0;
}

void WeightResidency::release(PlaceState& place) {
  SPILLWAY_CHECK(place.leases > 0, "a place is released once a lease");
  if (--place.leases > 0) return;
  // The plan needs the place for others before the block comes again, or a test wants every use fetched anew.
  if (place.leaves || options_.poison_released) place.block.reset();
  place.leaves = false;
}

// A place whose fetch was never used keeps it until it has come: chunks on their way must land somewhere that is
// theirs, and what is copied from host memory may be updated next.
void WeightResidency::drop(PlaceState& place) {
  if (options_.at_home) return;
  place.block.reset();
  place.ahead = place.leaves = false;
}

WeightAction WeightResidency::next() {
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].fetching && !places_[p].block) return {.kind = WeightAction::kDrain, .place = p};
  }
  return wanted_ ? serve() : prefetch();
}

// Weights that are there, else from the update that is still to come, else from where they live.
WeightAction WeightResidency::serve() {
  Wanted& wanted = *wanted_;
  if (!wanted.place) {
    wanted.place = find(wanted.block);
    wanted.hit = wanted.place && !places_[*wanted.place].ahead;
    if (!wanted.place) {
      wanted.place = place_for(wanted);
      if (!wanted.place) {
        const std::uint32_t block = wanted.block;
        wanted_.reset();
        return {.kind = WeightAction::kRefuse, .block = block};
      }
      drop(places_[*wanted.place]);
      if (places_[*wanted.place].fetching) return {.kind = WeightAction::kDrain, .place = *wanted.place};
    }
  }
  const std::uint32_t p = *wanted.place;
  PlaceState& place = places_[p];
  if (options_.at_home && update_.begun() && !std::exchange(wanted.passed, true)) {
    return {.kind = WeightAction::kUpdateAtHome, .block = wanted.block, .place = p};
  }
  if (place.block != wanted.block) {
    if (awaited(wanted.block) && !wanted.passed) {
      return {.kind = WeightAction::kUpdate, .block = wanted.block, .place = p};
    }
    return fetch(p, wanted.block);
  }
  if (place.fetching) return {.kind = WeightAction::kWait, .block = wanted.block, .place = p};
  place.ahead = false;
  // Unplanned visits change nothing of what the plan keeps.
  if (wanted.visit) place.leaves = planned()[*wanted.visit].leaves;
  ++place.leases;
  if (!options_.at_home) {
    ++hits_.visits;
    hits_.hits += wanted.hit;
  }
  const std::uint32_t block = wanted.block;
  wanted_.reset();
  return {.kind = WeightAction::kLend, .block = block, .place = p};
}

WeightAction WeightResidency::fetch(std::uint32_t place, std::uint32_t block) {
  places_[place].block = block;
  places_[place].fetching = true;
  return {.kind = WeightAction::kFetch, .block = block, .place = place};
}

// A fetch whose place is free, in visit order.
WeightAction WeightResidency::prefetch() {
  for (const std::size_t end = again_ ? pass_visits_ : visits_.size(); fetched_ < end; ++fetched_) {
    const VisitPlace& planned = this->planned()[fetched_];
    const std::uint32_t block = visits_[fetched_];
    if (!planned.fetch && !off_plan_) continue;
    if (const auto held = find(block)) {
      if (!planned.fetch) continue;
      // By then it will have left, or another block will have come.
      if (visited_before(fetched_) || places_[*held].leaves || taken_before(fetched_, *held)) return {};
      continue;
    }
    if (!planned.fetch && visited_before(fetched_)) continue;  // that one brings it
    // Its first visit brings the weights straight from the update; a later one has to wait for that.
    if (awaited(block)) {
      if (visited_before(fetched_)) return {};
      continue;
    }
    // The place must have been visited by everybody who was promised it, and given back.
    if (planned.after && *planned.after >= cursor_) return {};
    PlaceState& place = places_[planned.place];
    if (place.leases > 0 || (off_plan_ && wanted_before(fetched_, planned.place))) return {};
    if (bytes_ahead() >= options_.prefetch_bytes) return {};
    drop(place);
    if (place.fetching) return {.kind = WeightAction::kDrain, .place = planned.place};
    place.ahead = true;
    return fetch(planned.place, block);
  }
  return {};
}

std::uint64_t WeightResidency::bytes_ahead() const {
  std::uint64_t bytes = 0;
  for (const PlaceState& place : places_) bytes += place.ahead ? options_.block_bytes[*place.block] : 0;
  return bytes;
}

// Between the cursor and `visit`, the same block.
bool WeightResidency::visited_before(std::size_t visit) const {
  const auto first = visits_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto last = visits_.begin() + static_cast<std::ptrdiff_t>(visit);
  return std::find(first, last, visits_[visit]) != last;
}

// Another block is to come to the place between the cursor and `visit`.
bool WeightResidency::taken_before(std::size_t visit, std::uint32_t place) const {
  for (std::size_t v = cursor_; v < visit; ++v) {
    if (planned()[v].place == place && visits_[v] != visits_[visit]) return true;
  }
  return false;
}

// What lies in the place is visited between the cursor and `visit`.
bool WeightResidency::wanted_before(std::size_t visit, std::uint32_t place) const {
  for (std::size_t v = cursor_; v < visit; ++v) {
    if (places_[place].block == visits_[v]) return true;
  }
  return false;
}

std::optional<std::uint32_t> WeightResidency::find(std::uint32_t block) const {
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].block == block) return p;
  }
  return std::nullopt;
}

// The planned one, if it is free. Else an empty place is best, then one that nothing is on its way to; what would stay
// for good goes last.
std::optional<std::uint32_t> WeightResidency::place_for(const Wanted& wanted) const {
  if (wanted.visit && places_[planned()[*wanted.visit].place].leases == 0) return planned()[*wanted.visit].place;
  std::optional<std::uint32_t> choice;
  const auto cost = [this](std::uint32_t p) {
    return 4 * stays(p) + 2 * places_[p].fetching + places_[p].block.has_value();
  };
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].leases > 0 || options_.place_bytes[p] < options_.block_bytes[wanted.block]) continue;
    if (!choice || cost(p) < cost(*choice)) choice = p;
  }
  return choice;
}

bool WeightResidency::leased() const {
  return std::ranges::any_of(places_, [](const PlaceState& place) { return place.leases > 0; });
}

}  // namespace spillway
