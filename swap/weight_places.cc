#include "swap/weight_places.h"

#include <algorithm>

namespace spillway {

WeightPlaces::WeightPlaces(Device& device, BlockFetcher& fetcher, const WeightPlacesOptions& options, Route route,
                           Update update)
    : device_(device),
      fetcher_(fetcher),
      options_(options),
      route_(std::move(route)),
      update_(std::move(update)),
      places_(options.places.size()),
      filled_(options.places.size()) {
  for (const auto& place : options.places) place_bytes_.push_back(place.size());
  for (Place& place : places_) {
    place.fetch = std::make_unique<BlockFetch>(device, options.max_pieces, options.max_granules);
    place.released = device.create_event();
  }
  SPILLWAY_CHECK(places_.size() <= fetcher.most_fetches(), "every place may be on its way");
}

void WeightPlaces::begin_step(std::span<const std::uint32_t> visit_blocks) {
  bool same = std::ranges::equal(visits_, visit_blocks);
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    SPILLWAY_CHECK(places_[p].leases == 0, "no lease outlives its step");
    const std::uint8_t stays = this->stays(p);
    if (stays == 0) drop(places_[p]);
    same &= std::exchange(filled_[p], stays) == stays;
  }
  hits_ = {};
  if (!same) {
    visits_.assign(visit_blocks.begin(), visit_blocks.end());
    plan_ = assign_places(visits_, options_.block_bytes, place_bytes_,
                          {.owners = options_.owners, .reuse_bytes = options_.reuse_bytes, .filled = filled_});
  }
  cursor_ = fetched_ = 0;
  prefetch();
}

// What lies there, or is on its way, is right in the next step too.
bool WeightPlaces::stays(std::uint32_t place) const {
  const auto& block = places_[place].block;
  return block && !options_.owners.empty() && options_.owners[place] == block && !options_.frozen.empty() &&
         options_.frozen[*block] != 0;
}

void WeightPlaces::prefetch() {
  for (; fetched_ < visits_.size(); ++fetched_) {
    const VisitPlace& planned = plan_[fetched_];
    if (!planned.fetch) continue;
    if (const auto held = find(visits_[fetched_])) {
      // By then it will have left, or another block will have come.
      if (visited_before(fetched_) || places_[*held].leaves || taken_before(fetched_, *held)) return;
      continue;
    }
    // Its first visit brings the weights straight from the update; a later one has to wait for that.
    if (update_.awaited(visits_[fetched_])) {
      if (visited_before(fetched_)) return;
      continue;
    }
    // The place must have been visited by everybody who was promised it, and given back.
    if (planned.after && *planned.after >= cursor_) return;
    if (places_[planned.place].leases > 0) return;
    if (bytes_ahead() >= options_.prefetch_bytes) return;
    drop(places_[planned.place]);
    start_fetch(planned.place, visits_[fetched_]);
    places_[planned.place].ahead = true;
  }
}

std::uint64_t WeightPlaces::bytes_ahead() const {
  std::uint64_t bytes = 0;
  for (const Place& place : places_) bytes += place.ahead ? options_.block_bytes[*place.block] : 0;
  return bytes;
}

// Between the cursor and `visit`, the same block.
bool WeightPlaces::visited_before(std::size_t visit) const {
  const auto first = visits_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto last = visits_.begin() + static_cast<std::ptrdiff_t>(visit);
  return std::find(first, last, visits_[visit]) != last;
}

// Another block is to come to the place between the cursor and `visit`.
bool WeightPlaces::taken_before(std::size_t visit, std::uint32_t place) const {
  for (std::size_t v = cursor_; v < visit; ++v) {
    if (plan_[v].place == place && visits_[v] != visits_[visit]) return true;
  }
  return false;
}

// Weights from the update that is still to come, else from where they live.
void WeightPlaces::bring(std::uint32_t index, std::uint32_t block) {
  if (update_.awaited(block)) {
    Place& place = places_[index];
    Event* after = place.released->recorded() ? place.released.get() : nullptr;
    if (update_.deliver(block, address(index), after, place.fetch->ready())) {
      place.block = block;
      return;
    }
  }
  start_fetch(index, block);
}

void WeightPlaces::start_fetch(std::uint32_t index, std::uint32_t block) {
  Place& place = places_[index];
  place.fetch->pieces.clear();
  route_(block, address(index), place.fetch->pieces);
  place.block = block;
  place.fetching = true;
  place.fetch->after = place.released->recorded() ? place.released.get() : nullptr;
  fetcher_.start(*place.fetch);
}

// A place whose fetch was never used keeps it until it has come: chunks on their way must land somewhere that is
// theirs, and what is copied from host memory may be updated next.
void WeightPlaces::drop(Place& place) {
  if (place.fetching) {
    try {
      fetcher_.wait_open(*place.fetch);
      device_.synchronize(place.fetch->ready());
    } catch (const Error&) {  // nobody wanted it; whoever does gets the error of its own fetch
    }
    place.fetching = false;
  }
  place.block.reset();
  place.ahead = place.leaves = false;
}

std::optional<std::uint32_t> WeightPlaces::find(std::uint32_t block) const {
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].block == block) return p;
  }
  return std::nullopt;
}

std::uint32_t WeightPlaces::place_for_unplanned(std::uint32_t block) {
  std::optional<std::uint32_t> choice;
  // An empty place is best, then one that nothing is on its way to; what would stay for good goes last.
  const auto cost = [this](std::uint32_t p) {
    return 4 * stays(p) + 2 * places_[p].fetching + places_[p].block.has_value();
  };
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (places_[p].leases > 0 || place_bytes_[p] < options_.block_bytes[block]) continue;
    if (!choice || cost(p) < cost(*choice)) choice = p;
  }
  if (!choice) {
    throw Error(Code::kDoesNotFit,
                {"block " + std::to_string(block),
                 "every one of the " + std::to_string(places_.size()) + " places in HBM that could hold it is leased",
                 0, "release a lease first, or raise spillway.hbm_bytes"});
  }
  drop(places_[*choice]);
  return *choice;
}

std::uint32_t WeightPlaces::acquire(std::uint32_t block, std::optional<std::size_t> visit, Stream& stream) {
  if (visit) {
    cursor_ = *visit + 1;
    fetched_ = std::max(fetched_, cursor_);
  }
  std::optional<std::uint32_t> index = find(block);
  const bool hit = index && !places_[*index].ahead;
  if (!index) {
    const bool planned_free = visit && places_[plan_[*visit].place].leases == 0;
    index = planned_free ? plan_[*visit].place : place_for_unplanned(block);
    drop(places_[*index]);
    bring(*index, block);
  }
  Place& place = places_[*index];
  if (place.fetching) {
    try {
      fetcher_.wait_open(*place.fetch);
    } catch (...) {
      place.fetching = place.ahead = false;
      place.block.reset();
      throw;
    }
    place.fetching = false;
  }
  device_.wait(stream, place.fetch->ready());
  place.ahead = false;
  if (visit) place.leaves = plan_[*visit].leaves;
  ++place.leases;
  ++hits_.visits;
  hits_.hits += hit;
  prefetch();
  return *index;
}

void WeightPlaces::release(std::uint32_t index, Stream& stream) {
  Place& place = places_[index];
  SPILLWAY_CHECK(place.leases > 0, "a place is released once a lease");
  if (--place.leases > 0) return;
  if (options_.poison_released) {
    device_.fill_async(address(index), std::byte{0xff}, place_bytes_[index], stream);  // NaN in fp32 and bf16
    place.block.reset();
  }
  if (place.leaves) place.block.reset();
  place.leaves = false;
  device_.record(*place.released, stream);
  prefetch();
}

bool WeightPlaces::leased() const {
  return std::ranges::any_of(places_, [](const Place& place) { return place.leases > 0; });
}

bool WeightPlaces::lends(std::span<const std::byte> memory) const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].leases > 0 && lies_in(memory, options_.places[i])) return true;
  }
  return false;
}

void WeightPlaces::forget() {
  for (Place& place : places_) drop(place);
}

void WeightPlaces::settle() {
  for (Place& place : places_) {
    if (place.fetching) drop(place);
  }
}

}  // namespace spillway
