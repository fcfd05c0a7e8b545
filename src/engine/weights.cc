#include "src/engine/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spillway/error.h"
#include "src/plan/layout.h"

namespace spillway {
namespace {

// A block's tiles, and the granules of its weights on NVMe, at most.
WeightPlacesOptions places_of(const Plan& plan, Device& device, bool poison_released) {
  WeightPlacesOptions options{.poison_released = poison_released};
  const auto add = [&](const Region& place) {
    options.places.push_back(device.hbm().subspan(place.offset, place.bytes));
  };
  for (const Region& place : plan.hbm.places) add(place);
  for (const BlockPlan& block : plan.blocks) {
    if (plan.hbm.places.empty()) {
      add(block.weights);
      continue;
    }
    std::uint64_t granules = 0;
    for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
      granules += div_up(extent_bytes(plan.tile_places[t].shape, Part::kWeights), kGranuleBytes);
    }
    options.max_pieces = std::max<std::size_t>(options.max_pieces, block.tiles);
    options.max_granules = std::max<std::size_t>(options.max_granules, granules);
  }
  return options;
}

}  // namespace

Weights::Weights(const Plan& plan, WeightResidencyOptions policy, const WeightsParts& parts)
    : plan_(plan),
      with_(parts),
      places_(parts.device, parts.h2d, parts.fetcher, places_of(plan, parts.device, policy.poison_released)),
      frozen_(frozen_blocks(plan)),
      policy_(std::move(policy), parts.tiles.queue()),
      gathered_(policy_.places()) {
  if (!with_.communicator) return;
  for (std::size_t p = 0; p < policy_.places(); ++p) come_.push_back(with_.device.create_event());
  const std::uint64_t element = size_of(plan.tile_places[0].shape.type);
  for (const BlockPlan& block : plan.blocks) {
    auto& sections = slice_bytes_.emplace_back();
    for (const SectionShare& share : block.shares) {
      auto& bytes = sections.emplace_back();
      for (const std::uint64_t elements : share.elements_of) bytes.push_back(elements * element);
    }
  }
}

void Weights::begin_step(std::span<const std::uint32_t> visit_blocks, std::size_t pass_visits) {
  gathered_.begin_step(policy_, frozen_);
  policy_.tell({.kind = WeightEvent::kBegin, .visits = visit_blocks, .pass_visits = pass_visits});
  run(nullptr);
}

void Weights::begin_again() {
  policy_.tell({.kind = WeightEvent::kAgain});
  run(nullptr);
}

std::uint32_t Weights::acquire(std::uint32_t block, std::optional<std::size_t> visit, Stream& stream) {
  // The policy answers with whatever it takes (wait, update, fetch) and ends with kLend: run() does all of it.
  policy_.tell({.kind = WeightEvent::kAcquire, .block = block, .visit = visit});
  return *run(&stream);
}

void Weights::release(std::uint32_t place, Stream& stream) {
  policy_.tell({.kind = WeightEvent::kRelease, .place = place});
  // Only the last lease of a place records its event: the next fetch to the place waits for that one event alone.
  if (!policy_.leased(place)) places_.release(place, stream);
  run(nullptr);
}

void Weights::forget() {
  gathered_.forget();
  policy_.tell({.kind = WeightEvent::kForget});
  run(nullptr);
}

// Does what the policy answers until it has nothing more to say. Returns the place that was lent, if one was.
std::optional<std::uint32_t> Weights::run(Stream* stream) {
  std::optional<std::uint32_t> lent;
  for (WeightAction action = policy_.next(); action.kind != WeightAction::kNothing; action = policy_.next()) {
    if (action.kind == WeightAction::kRefuse) refuse(action.block);
    if (action.kind == WeightAction::kLend) {
      lend(action.place, *stream);
      lent = action.place;
      continue;
    }
    try {
      act(action);
    } catch (...) {
      // Or the policy would wait for ever for a fetch that nobody has started.
      policy_.tell({.kind = WeightEvent::kFailed, .place = action.place});
      throw;
    }
  }
  return lent;
}

void Weights::lend(std::uint32_t place, Stream& stream) {
  // From here on the stream waits for the last copy, on the device; the caller's thread goes on.
  if (!with_.communicator) return places_.open(place, stream);
  if (gathered_.lend(place)) gather(place);
  with_.device.wait(stream, *come_[place]);
}

// In the order of leases, which is the same on all ranks.
void Weights::gather(std::uint32_t place) {
  const std::uint32_t b = policy_.block(place);
  const BlockPartition& partition = plan_.blocks[b].partition;
  const std::uint64_t element = size_of(plan_.tile_places[0].shape.type);
  places_.open(place, *with_.net);
  for (std::size_t s = 0; s < partition.sections.size(); ++s) {
    const Section& section = partition.sections[s];
    const auto bytes = places_.memory(place).subspan(section.first * element, section.elements * element);
    with_.communicator->all_gather(bytes, slice_bytes_[b][s], static_cast<std::int32_t>(b), *with_.net);
  }
  with_.device.record(*come_[place], *with_.net);
  moved_ += network_of(plan_, b).weights;
}

void Weights::act(const WeightAction& action) {
  // Each action is done by somebody else, and told to the policy when it is: an update by the TileExecutor, a fetch by
  // WeightPlaces and the fetcher.
  const auto& [kind, block, place] = action;
  gathered_.act(action);
  switch (kind) {
    case WeightAction::kUpdate:
    case WeightAction::kUpdateAtHome: {
      const bool at_home = kind == WeightAction::kUpdateAtHome;
      // The update copies tile by tile to the place as it makes them, without a fetch: weights of this step are never
      // read back from the drive in the forward pass that follows it.
      places_.begin_copies(place);
      const bool brought = with_.tiles.run_until(block, at_home ? nullptr : address(place)) || at_home;
      if (brought) places_.end_copies(place);
      return policy_.tell(
          {.kind = brought ? WeightEvent::kBrought : WeightEvent::kPassed, .block = block, .place = place});
    }
    case WeightAction::kFetch: fill_pieces(block, place); return places_.start_fetch(place);
    case WeightAction::kWait: places_.wait_fetch(place); break;
    case WeightAction::kDrain: places_.drain(place); break;
    case WeightAction::kNothing:
    case WeightAction::kLend:
    case WeightAction::kRefuse: return;
  }
  policy_.tell({.kind = WeightEvent::kArrived, .place = place});
}

// From where the block's tiles live. What is updated inside backward is not seen before the next step.
void Weights::fill_pieces(std::uint32_t b, std::uint32_t place) {
  constexpr std::size_t kWeights = index_of(Part::kWeights);
  std::vector<FetchPiece>& pieces = places_.pieces(place);
  const BlockPlan& block = plan_.blocks[b];
  // A read that overlaps a write under way may see old bytes, so the writes of these tiles come first.
  with_.mover.finish_saves_of(block.first_tile, block.first_tile + block.tiles);
  const bool committed = with_.tiles.queue().weights_from(b) == WeightsFrom::kCommitted;
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    const TilePlace& tile = plan_.tile_places[t];
    FetchPiece piece{.tile = t,
                     .to = address(place) + plan_.tiles[t].range.first * size_of(tile.shape.type),
                     .payload_bytes = payload_bytes(tile.shape, Part::kWeights)};
    if (tile.home[kWeights] == Placement::kHost) {
      piece.resident = with_.host.data() + tile.offset[kWeights];
    } else if (tile.home[kWeights] == Placement::kHbm) {
      piece.resident = with_.device.hbm().data() + tile.offset[kWeights];
      piece.in_hbm = true;
    } else {
      // The slot, and with it the range of the store's space, is chosen here. From here on the fetch is bytes alone.
      const TileStore::Slot slot = committed ? with_.store->committed(t) : with_.store->readable(t);
      piece.extent = slot.extent[kWeights];
      piece.checksum = slot.checksum[kWeights];
    }
    pieces.push_back(piece);
  }
}

bool Weights::lends(std::span<const std::byte> memory) const {
  for (std::uint32_t p = 0; p < policy_.places(); ++p) {
    if (policy_.leased(p) && lies_in(memory, places_.memory(p))) return true;
  }
  return false;
}

void Weights::refuse(std::uint32_t block) const {
  throw Error(Code::kDoesNotFit,
              {fmt::format("block {}", block),
               fmt::format("every one of the {} places in HBM that could hold it is leased", policy_.places()), 0,
               "release a lease first, or raise spillway.hbm_bytes"});
}

}  // namespace spillway
