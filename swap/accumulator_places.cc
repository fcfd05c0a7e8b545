#include "swap/accumulator_places.h"

#include "spillway/error.h"

namespace spillway {
namespace {

std::vector<std::uint64_t> sizes_of(const std::vector<std::span<std::byte>>& memories) {
  std::vector<std::uint64_t> sizes;
  for (const std::span<std::byte> memory : memories) sizes.push_back(memory.size());
  return sizes;
}

}  // namespace

AccumulatorPlaces::AccumulatorPlaces(Device& device, Stream& h2d, Stream& d2h, std::vector<std::span<std::byte>> places,
                                     std::vector<std::span<std::byte>> homes, Timeline* timeline)
    : device_(device), h2d_(h2d), d2h_(d2h), timeline_(timeline), residency_(sizes_of(places), sizes_of(homes)) {
  for (const std::span<std::byte> memory : places) {
    places_.push_back({.memory = memory, .used = device.create_event(), .come = device.create_event()});
  }
  for (const std::span<std::byte> memory : homes) {
    homes_.push_back({.memory = memory, .come = memory.empty() ? nullptr : device.create_event()});
  }
}

void AccumulatorPlaces::begin_step() { residency_.begin_step(); }

void AccumulatorPlaces::expect(std::uint32_t block) {
  const std::uint32_t coming = bring(block);
  for (std::uint32_t p = 0; p < places_.size(); ++p) {
    if (p == coming) continue;
    // While the coming block computes, so that its sums find a free place and the copy costs nothing.
    if (const auto leaves = residency_.leave(p)) send_home(*leaves, places_[p]);
  }
}

float* AccumulatorPlaces::acquire(std::uint32_t block, Stream& stream) {
  HbmPlace& place = places_[bring(block)];
  if (!residency_.add(block)) {
    if (place.free) device_.wait(stream, *place.free);
    // Two streams add to the same sums: the second waits for the first.
  } else if (place.stream != &stream) {
    device_.record(*place.used, *place.stream);
    device_.wait(stream, *place.used);
  }
  place.stream = &stream;
  return reinterpret_cast<float*>(place.memory.data());
}

void AccumulatorPlaces::complete(std::uint32_t block, Stream& stream) {
  HbmPlace& place = places_[residency_.complete(block)];
  device_.record(*place.used, stream);
  place.free = place.used.get();
}

void AccumulatorPlaces::wait_idle() {
  for (const HbmPlace& place : places_) device_.synchronize(*place.come);
  for (const Home& home : homes_) {
    if (home.come) device_.synchronize(*home.come);
  }
}

std::uint32_t AccumulatorPlaces::bring(std::uint32_t block) {
  SPILLWAY_CHECK(homes_[block].come, "sums that come here have a home");
  const AccumulatorResidency::Arrival arrival = residency_.bring(block);
  HbmPlace& place = places_[arrival.place];
  if (arrival.leaves) send_home(*arrival.leaves, place);
  if (arrival.comes) fetch(block, place);
  return arrival.place;
}

void AccumulatorPlaces::send_home(std::uint32_t block, HbmPlace& place) {
  const Home& home = homes_[block];
  const std::uint64_t bytes = home.memory.size();
  device_.record(*place.used, *place.stream);
  // After the last addition that was enqueued.
  device_.wait(d2h_, *place.used);
  {
    const StreamSpan span(timeline_, {.kind = SpanKind::kAccumulatorDown, .subject = block, .bytes = bytes}, d2h_);
    device_.copy_async(CopyKind::kDeviceToHost, home.memory.data(), place.memory.data(), bytes, d2h_);
  }
  device_.record(*home.come, d2h_);
  place.free = home.come.get();
  d2h_bytes_ += bytes;
}

void AccumulatorPlaces::fetch(std::uint32_t block, HbmPlace& place) {
  const Home& home = homes_[block];
  const std::uint64_t bytes = home.memory.size();
  // The place may still be read by the copy that takes its last block home.
  if (place.free) device_.wait(h2d_, *place.free);
  // The home's bytes may still be on their way down from an earlier use.
  device_.wait(h2d_, *home.come);
  {
    const StreamSpan span(timeline_, {.kind = SpanKind::kAccumulatorUp, .subject = block, .bytes = bytes}, h2d_);
    device_.copy_async(CopyKind::kHostToDevice, place.memory.data(), home.memory.data(), bytes, h2d_);
  }
  device_.record(*place.come, h2d_);
  place.free = place.come.get();
  h2d_bytes_ += bytes;
}

}  // namespace spillway
