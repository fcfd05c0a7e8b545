// Weights for whoever computes: leases on blocks, wherever their weights live. This asks the policy (WeightResidency)
// what to do and has the update or the fetcher do it, so that neither knows of the other:
//
//   StepEngine ─► Weights ─► WeightResidency          what next?
//                    ├─────► TileExecutor             make the block's update, its weights go to the place
//                    └─────► WeightPlaces ─► BlockFetcher        fetch, wait, lend
//
// It chooses no place and copies no byte. With several ranks each fetches or updates what it owns of a block, and the
// rest is gathered from the others before the lease begins. One thread at a time (the engine's). Errors: kIo and
// kCorrupt from a fetch, those of an update; kDoesNotFit when every place is leased.
// Read next: swap/policy/weight_residency.h for the rules, swap/weight_places.h for a fetch, tile_executor.h for an
// update.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/engine/tile_executor.h"
#include "src/plan/network_traffic.h"
#include "src/plan/plan.h"
#include "swap/block_fetcher.h"
#include "swap/policy/gathered_places.h"
#include "swap/policy/weight_residency.h"
#include "swap/tile_store.h"
#include "swap/weight_places.h"

namespace spillway {

struct WeightsParts {
  Device& device;
  Stream& h2d;
  BlockFetcher* fetcher = nullptr;  // null while weights stay in HBM
  TileExecutor& tiles;              // its queue says what of a block is readable
  TileMover& mover;
  TileStore* store = nullptr;      // null without NVMe
  std::span<std::byte> host = {};  // the arena
  // With several ranks: what they tell each other, and the stream on which that is done.
  Communicator* communicator = nullptr;
  Stream* net = nullptr;
};

class Weights {
 public:
  Weights(const Plan& plan, WeightResidencyOptions policy, const WeightsParts& parts);
  ~Weights() { forget(); }  // fetches under way name the places
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // The blocks that will be visited from now on, in order; the first `pass_visits` are the first forward pass.
  void begin_step(std::span<const std::uint32_t> visit_blocks, std::size_t pass_visits);
  // The same visits once more, with no step in between. Not while something is leased.
  void begin_again();
  // Makes `stream` wait for the block's weights and returns the place that is leased. Blocks while reads are late and
  // for the block's update. `visit` is the index of the planned visit this is, if it is one.
  std::uint32_t acquire(std::uint32_t block, std::optional<std::size_t> visit, Stream& stream);
  // `stream`: has come by all work under leases of the place, once it has run what is on it.
  void release(std::uint32_t place, Stream& stream);
  // Nothing that was fetched is the model's any more. Not while something is leased.
  void forget();

  bool all_acquired() const noexcept { return policy_.all_acquired(); }
  WeightResidency::Hits hits() const noexcept { return policy_.hits(); }
  const Collectives& moved() const noexcept { return moved_; }  // from other ranks
  std::uint32_t block(std::uint32_t place) const { return policy_.block(place); }
  std::byte* address(std::uint32_t place) const { return places_.memory(place).data(); }
  bool leased() const { return policy_.leased(); }
  bool lends(std::span<const std::byte> memory) const;  // all of it lies in one place that is leased

 private:
  std::optional<std::uint32_t> run(Stream* stream);
  void lend(std::uint32_t place, Stream& stream);
  void gather(std::uint32_t place);
  void act(const WeightAction& action);
  void fill_pieces(std::uint32_t block, std::uint32_t place);
  [[noreturn]] void refuse(std::uint32_t block) const;

  const Plan& plan_;
  const WeightsParts with_;
  WeightPlaces places_;
  const std::vector<std::uint8_t> frozen_;  // by block
  WeightResidency policy_;
  GatheredPlaces gathered_;
  Collectives moved_;
  // With several ranks.
  std::vector<std::unique_ptr<Event>> come_;                          // by place: all of its block is there
  std::vector<std::vector<std::vector<std::uint64_t>>> slice_bytes_;  // by block, section and rank
};

}  // namespace spillway
