#include "swap/weight_places.h"

namespace spillway {

WeightPlaces::WeightPlaces(Device& device, Stream& h2d, BlockFetcher* fetcher, const WeightPlacesOptions& options)
    : device_(device), h2d_(h2d), fetcher_(fetcher), options_(options), places_(options.places.size()) {
  for (HbmPlace& place : places_) {
    place.fetch = std::make_unique<BlockFetch>(device, options.max_pieces, options.max_granules);
    place.released = device.create_event();
  }
  SPILLWAY_CHECK(!fetcher || places_.size() <= fetcher->most_fetches(), "every place may be on its way");
}

Event* WeightPlaces::released(std::uint32_t place) const {
  Event& event = *places_[place].released;
  return event.recorded() ? &event : nullptr;
}

std::vector<FetchPiece>& WeightPlaces::pieces(std::uint32_t place) {
  places_[place].fetch->pieces.clear();
  return places_[place].fetch->pieces;
}

void WeightPlaces::start_fetch(std::uint32_t place) {
  BlockFetch& fetch = *places_[place].fetch;
  // The old block may still be read by kernels that are enqueued: the copy stream waits for them, the host does not.
  fetch.after = released(place);
  fetcher_->start(fetch);
}

void WeightPlaces::wait_fetch(std::uint32_t place) { fetcher_->wait_open(*places_[place].fetch); }

void WeightPlaces::drain(std::uint32_t place) {
  BlockFetch& fetch = *places_[place].fetch;
  try {
    fetcher_->wait_open(fetch);
    device_.synchronize(fetch.ready());
  } catch (const Error&) {  // nobody wanted it; whoever does gets the error of its own fetch
  }
}

void WeightPlaces::begin_copies(std::uint32_t place) {
  // As before a fetch: the place's last reader comes first.
  if (Event* after = released(place)) device_.wait(h2d_, *after);
}

void WeightPlaces::end_copies(std::uint32_t place) { device_.record(places_[place].fetch->ready(), h2d_); }

void WeightPlaces::open(std::uint32_t place, Stream& stream) {
  Event& ready = places_[place].fetch->ready();
  // A stream must not wait for an event that was never recorded (CUDA takes that for done): a place to which nothing
  // ever came has weights that live there.
  if (ready.recorded()) device_.wait(stream, ready);
}

void WeightPlaces::release(std::uint32_t place, Stream& stream) {
  if (!fetcher_) return;  // what an update overwrites nobody reads any more
  if (options_.poison_released) {
    const auto memory = options_.places[place];
    device_.fill_async(memory.data(), std::byte{0xff}, memory.size(), stream);  // NaN in fp32 and bf16
  }
  device_.record(*places_[place].released, stream);
}

}  // namespace spillway
