#include "swap/activation_places.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/checksum.h"

namespace spillway {
namespace {

const char* name_of(Access access) {
  switch (access) {
    case Access::kRead: return "be read";
    case Access::kWrite: return "be written";
    case Access::kUpdate: return "be updated";
  }
  return "";
}

}  // namespace

ActivationPlaces::ActivationPlaces(Device& device, BlockFetcher* fetcher, BlockSpiller* spiller,
                                   ActivationPlacesOptions options)
    : device_(device),
      fetcher_(fetcher),
      spiller_(spiller),
      options_(std::move(options)),
      places_(options_.places.size()),
      absent_(options_.bytes.size()) {
  std::size_t granules = 0;
  for (const ActivationHome& home : options_.homes) {
    granules = std::max<std::size_t>(granules, div_up(home.extent.bytes, kGranuleBytes));
  }
  for (HbmPlace& place : places_) {
    place.released = device.create_event();
    if (!moves()) continue;
    place.fetch = std::make_unique<BlockFetch>(device, 1, granules);
    place.spill = std::make_unique<BlockSpill>(device, 1, granules);
  }
}

ActivationPlaces::~ActivationPlaces() { wait_idle(); }

// Blocks until nothing is under way. Returns the first failure of a write; a fetch that nobody used may fail.
std::optional<Error> ActivationPlaces::wait_idle() {
  std::optional<Error> failure;
  for (HbmPlace& place : places_) {
    if (std::exchange(place.fetching, false)) {
      try {
        fetcher_->wait_open(*place.fetch);
      } catch (const Error&) {
      }
      place.last = &place.fetch->ready();
    }
    if (std::exchange(place.spilling, false)) {
      try {
        spiller_->wait_written(*place.spill);
      } catch (const Error& error) {
        if (!failure) failure = error;
      }
    }
  }
  return failure;
}

void ActivationPlaces::begin_step() {
  SPILLWAY_CHECK(!leased(), "no lease outlives its step");
  if (!moves()) return;
  if (const auto failure = wait_idle()) throw *failure;
  // Activations belong to one step: the next one begins without any.
  for (HbmPlace& place : places_) place.activation.reset();
  for (Absent& activation : absent_) activation.spilled_from.reset();
  cursor_ = fetched_ = 0;
}

void ActivationPlaces::refuse(std::uint32_t activation, const std::string& happened, const std::string& hint) const {
  throw Error(Code::kInvalidArgument, {"activation " + std::to_string(activation), happened, 0, hint});
}

void ActivationPlaces::check_use(std::uint32_t activation, Access access) {
  const auto is = [&](std::size_t use) {
    return options_.uses[use].activation == activation && options_.uses[use].access == access;
  };
  const std::size_t count = options_.uses.size();
  if (cursor_ < count && is(cursor_)) {
    const HbmPlace& place = places_[options_.plan[cursor_].place];
    if (place.leases > 0 && place.activation != activation) {
      refuse(*place.activation, "is still held while its place is needed",
             "release it first, or describe more in activations_held");
    }
    return;
  }
  // The caller begins the uses again without a step in between: an evaluation, or a step that was given up.
  if (is(0) && !leased()) return begin_step();
  std::string next = "nothing is left to use in this step";
  if (cursor_ < count) {
    const ActivationUse& use = options_.uses[cursor_];
    next = "activation " + std::to_string(use.activation) + " is the next to " + name_of(use.access);
  }
  refuse(activation, std::string("came out of order, to ") + name_of(access) + ": " + next,
         "follow ModelDescription::activation_uses, or raise spillway.hbm_bytes until all activations stay in HBM");
}

std::uint32_t ActivationPlaces::acquire(std::uint32_t activation, Access access, Stream& stream) {
  if (activation >= options_.bytes.size()) refuse(activation, "does not exist", "use the indices of the description");
  std::uint32_t index = activation;
  if (moves()) {
    check_use(activation, access);
    bring(cursor_);
    index = options_.plan[cursor_].place;
    places_[index].use = cursor_++;
    // What bring() has fetched is not fetched ahead once more.
    fetched_ = std::max(fetched_, cursor_);
  }
  HbmPlace& place = places_[index];
  place.activation = activation;
  // The last event of the place, whatever it was: bytes came, were read or written, or left.
  if (place.last) device_.wait(stream, *place.last);
  ++place.leases;
  if (moves()) prefetch();
  return index;
}

void ActivationPlaces::release(std::uint32_t index, Stream& stream) {
  HbmPlace& place = places_[index];
  SPILLWAY_CHECK(place.leases > 0, "a place is released once a lease");
  if (--place.leases > 0) return;
  device_.record(*place.released, stream);
  place.last = place.released.get();
  if (!moves()) return;
  // Only where the plan says that the place is needed for another activation before this one is used again.
  if (options_.plan[place.use].spill) start_spill(place);
  prefetch();
}

bool ActivationPlaces::leased() const {
  return std::ranges::any_of(places_, [](const HbmPlace& place) { return place.leases > 0; });
}

bool ActivationPlaces::lends(std::span<const std::byte> memory) const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].leases > 0 && lies_in(memory, options_.places[i])) return true;
  }
  return false;
}

// The use's activation into its place, and the place out of the way of whatever is done there.
void ActivationPlaces::bring(std::size_t use) {
  const UsePlace& planned = options_.plan[use];
  HbmPlace& place = places_[planned.place];
  const std::uint32_t activation = options_.uses[use].activation;
  if (place.activation != activation) {
    // Out of HBM is enough: the write itself may go on while the place is used.
    if (place.spilling) spiller_->wait_left(*place.spill);
    if (planned.fetch) {
      const Absent& absent = absent_[activation];
      HbmPlace& from = places_[*absent.spilled_from];
      if (from.spilling && from.spilled == activation) {
        if (options_.homes[activation].host) {
          spiller_->wait_left(*from.spill);
        } else {
          finish_spill(from);
        }
      }
      start_fetch(use);
    }
  }
  if (!place.fetching) return;
  place.fetching = false;
  try {
    fetcher_->wait_open(*place.fetch);
  } catch (...) {
    // The place holds nothing whole now; a later use fetches again.
    place.activation.reset();
    throw;
  }
  place.last = &place.fetch->ready();
}

// Starts every fetch whose place is free and whose bytes are at home, in the order of uses.
void ActivationPlaces::prefetch() {
  for (; fetched_ < options_.uses.size(); ++fetched_) {
    if (!options_.plan[fetched_].fetch) continue;
    // In the order of uses: one that must wait holds up those after it, which are needed later.
    if (!ready_for(fetched_)) return;
    start_fetch(fetched_);
  }
}

bool ActivationPlaces::ready_for(std::size_t use) const {
  const UsePlace& planned = options_.plan[use];
  const HbmPlace& place = places_[planned.place];
  if (planned.after && *planned.after >= cursor_) return false;
  if (place.leases > 0 || (place.spilling && !spiller_->left(*place.spill))) return false;
  const std::uint32_t activation = options_.uses[use].activation;
  const HbmPlace& before = places_[options_.plan[planned.previous].place];  // where it is, or was
  if (planned.previous >= cursor_ || (before.leases > 0 && before.activation == activation)) return false;
  const Absent& absent = absent_[activation];
  const HbmPlace& from = places_[*absent.spilled_from];
  if (!from.spilling || from.spilled != activation) return true;
  return options_.homes[activation].host ? spiller_->left(*from.spill) : spiller_->written(*from.spill);
}

void ActivationPlaces::start_fetch(std::size_t use) {
  const std::uint32_t activation = options_.uses[use].activation;
  HbmPlace& place = places_[options_.plan[use].place];
  HbmPlace& from = places_[*absent_[activation].spilled_from];
  const ActivationHome& home = options_.homes[activation];
  if (!home.host && from.spilling && from.spilled == activation) finish_spill(from);  // it is written: no wait
  BlockFetch& fetch = *place.fetch;
  fetch.pieces.assign(1, {.tile = activation,
                          .to = options_.places[options_.plan[use].place].data(),
                          .payload_bytes = options_.bytes[activation],
                          .resident = home.host,
                          .extent = home.extent,
                          .checksum = absent_[activation].checksum});
  fetch.after = place.last;
  // In host memory the bytes are there once the copy down has ended, which only the stream can wait for.
  fetch.source = home.host ? &from.spill->left() : nullptr;
  place.activation = activation;
  place.fetching = true;
  fetcher_->start(fetch);
}

void ActivationPlaces::start_spill(HbmPlace& place) {
  // A place has one spill at a time: the one before must be written before its pieces are used again.
  finish_spill(place);
  const std::uint32_t activation = *place.activation;
  const ActivationHome& home = options_.homes[activation];
  const auto index = static_cast<std::uint32_t>(&place - places_.data());
  BlockSpill& spill = *place.spill;
  spill.pieces.assign(1, {.from = options_.places[index].data(),
                          .payload_bytes = options_.bytes[activation],
                          .resident = home.host,
                          .extent = home.extent});
  spill.after = place.released.get();
  spiller_->start(spill);
  place.last = &spill.left();
  place.spilling = true;
  place.spilled = activation;
  place.activation.reset();
  absent_[activation].spilled_from = index;
}

void ActivationPlaces::finish_spill(HbmPlace& place) {
  if (!place.spilling) return;
  spiller_->wait_written(*place.spill);
  place.spilling = false;
  absent_[place.spilled].checksum = place.spill->pieces[0].checksum;
}

}  // namespace spillway
