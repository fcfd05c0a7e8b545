#include "swap/accumulator_places.h"

#include <algorithm>
#include <utility>

#include "spillway/error.h"

namespace spillway {

AccumulatorPlaces::AccumulatorPlaces(Device& device, Stream& h2d, Stream& d2h, std::vector<std::span<std::byte>> places,
                                     std::vector<std::span<std::byte>> homes, Timeline* timeline)
    : device_(device), h2d_(h2d), d2h_(d2h), timeline_(timeline), places_(places.size()), blocks_(homes.size()) {
  for (std::size_t p = 0; p < places.size(); ++p) {
    places_[p].memory = places[p];
    places_[p].used = device.create_event();
    places_[p].come = device.create_event();
  }
  for (std::size_t b = 0; b < homes.size(); ++b) {
    blocks_[b].home = homes[b];
    if (!homes[b].empty()) blocks_[b].left = device.create_event();
  }
}

void AccumulatorPlaces::begin_step() {
  for (Place& place : places_) {
    place.block.reset();
    place.changed = false;
  }
  for (Block& block : blocks_) {
    block.place.reset();
    block.at_home = false;
  }
}

void AccumulatorPlaces::expect(std::uint32_t block) {
  const Place& coming = bring(block);
  for (Place& place : places_) {
    if (&place != &coming) send_home(place);
  }
}

float* AccumulatorPlaces::acquire(std::uint32_t b, Stream& stream) {
  Place& place = bring(b);
  if (!place.changed) {
    if (place.free) device_.wait(stream, *place.free);
  } else if (place.stream != &stream) {
    device_.record(*place.used, *place.stream);
    device_.wait(stream, *place.used);
  }
  place.stream = &stream;
  place.changed = true;
  blocks_[b].at_home = false;
  return reinterpret_cast<float*>(place.memory.data());
}

void AccumulatorPlaces::complete(std::uint32_t b, Stream& stream) {
  Block& block = blocks_[b];
  SPILLWAY_CHECK(block.place, "sums are complete where they were acquired");
  Place& place = places_[*block.place];
  device_.record(*place.used, stream);
  place.free = place.used.get();
  place.block.reset();
  place.changed = false;
  block.place.reset();
}

void AccumulatorPlaces::settle() {
  for (const Place& place : places_) device_.synchronize(*place.come);
  for (const Block& block : blocks_) {
    if (block.left) device_.synchronize(*block.left);
  }
}

AccumulatorPlaces::Place& AccumulatorPlaces::bring(std::uint32_t b) {
  SPILLWAY_CHECK(has(b), "sums that come here have a home");
  Block& block = blocks_[b];
  Place& place = block.place ? places_[*block.place] : choose(b);
  place.turn = ++turn_;
  if (block.place) return place;
  if (place.block) {
    send_home(place);
    blocks_[*place.block].place.reset();
  }
  place.block = b;
  block.place = static_cast<std::size_t>(&place - places_.data());
  if (!block.at_home) return place;
  if (place.free) device_.wait(h2d_, *place.free);
  device_.wait(h2d_, *block.left);
  const std::uint64_t bytes = block.home.size();
  {
    const StreamSpan span(timeline_, {.kind = SpanKind::kAccumulatorUp, .subject = b, .bytes = bytes}, device_, h2d_);
    device_.copy_async(CopyKind::kHostToDevice, place.memory.data(), block.home.data(), bytes, h2d_);
  }
  device_.record(*place.come, h2d_);
  place.free = place.come.get();
  h2d_bytes_ += bytes;
  return place;
}

// An empty one, else the one that was asked for longest ago.
AccumulatorPlaces::Place& AccumulatorPlaces::choose(std::uint32_t block) {
  Place* choice = nullptr;
  const auto rank = [](const Place& place) { return std::pair(place.block.has_value(), place.turn); };
  for (Place& place : places_) {
    if (place.memory.size() < blocks_[block].home.size()) continue;
    if (!choice || rank(place) < rank(*choice)) choice = &place;
  }
  SPILLWAY_CHECK(choice, "each block fits a place");
  return *choice;
}

// Its block's sums, which stay where they are as well.
void AccumulatorPlaces::send_home(Place& place) {
  if (!place.changed) return;
  Block& block = blocks_[*place.block];
  const std::uint64_t bytes = block.home.size();
  device_.record(*place.used, *place.stream);
  device_.wait(d2h_, *place.used);
  {
    const StreamSpan span(timeline_, {.kind = SpanKind::kAccumulatorDown, .subject = *place.block, .bytes = bytes},
                          device_, d2h_);
    device_.copy_async(CopyKind::kDeviceToHost, block.home.data(), place.memory.data(), bytes, d2h_);
  }
  device_.record(*block.left, d2h_);
  place.free = block.left.get();
  place.changed = false;
  block.at_home = true;
  d2h_bytes_ += bytes;
}

}  // namespace spillway
