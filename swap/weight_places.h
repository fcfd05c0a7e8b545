// The HBM places of blocks on loan: leases, residency and prefetch along the planned visits. The plan is a hint that
// makes blocks arrive in time; whatever the caller asks for is served, planned or not.
//
// One thread at a time (the engine's). Errors: kIo and kCorrupt from a fetch; kDoesNotFit when every place is leased.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "swap/block_fetcher.h"
#include "swap/residency.h"

namespace spillway {

struct WeightPlacesOptions {
  std::vector<std::span<std::byte>> places;  // in HBM; every block fits one of them
  std::vector<std::uint64_t> block_bytes;    // of the blocks' weights
  std::size_t max_pieces = 0;                // tiles of the largest block
  std::size_t max_granules = 0;              // granules of its weights on NVMe, all tiles together
  // See ResidencyRules.
  std::vector<std::optional<std::uint32_t>> owners = {};
  std::uint64_t reuse_bytes = UINT64_MAX;
  std::vector<std::uint8_t> frozen = {};  // by block: no update changes it; empty: any may be changed
  // Another block is fetched ahead of its visit while fewer bytes than these are; 0: none ever is.
  std::uint64_t prefetch_bytes = UINT64_MAX;
  bool poison_released = false;
};

class WeightPlaces {
 public:
  // Fills fetch pieces for a block whose weights go to `to`.
  using Route = std::function<void(std::uint32_t block, std::byte* to, std::vector<FetchPiece>& pieces)>;

  // Where the new weights of a block whose update is still to come are had from: the update itself.
  struct Update {
    // The block's update has not been made: what lies on NVMe or in host memory is the step before.
    std::function<bool(std::uint32_t block)> awaited;
    // Makes it. The weights go to `to` once `after`, unless null, has come, and `ready` is recorded behind them. False:
    // they could not; they are to be fetched.
    std::function<bool(std::uint32_t block, std::byte* to, Event* after, Event& ready)> deliver;
  };

  WeightPlaces(Device& device, BlockFetcher& fetcher, const WeightPlacesOptions& options, Route route, Update update);
  ~WeightPlaces() { settle(); }  // fetches under way name the places
  WeightPlaces(const WeightPlaces&) = delete;
  WeightPlaces& operator=(const WeightPlaces&) = delete;

  // The blocks that will be visited from now on, in order. Everything resident is stale, but for frozen blocks in
  // places of their own: they stay, or go on coming.
  void begin_step(std::span<const std::uint32_t> visit_blocks);

  // Makes `stream` wait for the block's weights and returns its place. Blocks while reads are late and for the block's
  // update. `visit` is the index of the planned visit this is, if it is one.
  std::uint32_t acquire(std::uint32_t block, std::optional<std::size_t> visit, Stream& stream);
  // `stream`: has come by all work under leases of the place, once it has run what is on it.
  void release(std::uint32_t place, Stream& stream);
  // Starts every fetch whose place is free, in visit order.
  void prefetch();

  // Visits since begin_step(), and how many of them found the block where an earlier one had left it.
  struct Hits {
    std::uint64_t visits = 0, hits = 0;
  };
  Hits hits() const noexcept { return hits_; }

  std::byte* address(std::uint32_t place) const { return options_.places[place].data(); }
  std::uint32_t block(std::uint32_t place) const { return *places_[place].block; }
  bool leased() const;
  bool lends(std::span<const std::byte> memory) const;  // all of it lies in one place that is leased
  // Nothing that lies there, frozen or not, is the model's any more. Not while something is leased.
  void forget();
  // Blocks until no fetch is under way; failures are dropped with what they brought.
  void settle();

 private:
  struct Place {
    std::unique_ptr<BlockFetch> fetch;
    std::unique_ptr<Event> released;
    std::optional<std::uint32_t> block;
    std::uint32_t leases = 0;
    bool fetching = false;  // started and not yet waited for
    bool ahead = false;     // brought for a visit that is still to come
    bool leaves = false;    // the block is given up with the last lease
  };

  void start_fetch(std::uint32_t place, std::uint32_t block);
  void bring(std::uint32_t place, std::uint32_t block);
  bool stays(std::uint32_t place) const;
  bool visited_before(std::size_t visit) const;
  bool taken_before(std::size_t visit, std::uint32_t place) const;
  std::uint64_t bytes_ahead() const;
  std::optional<std::uint32_t> find(std::uint32_t block) const;
  std::uint32_t place_for_unplanned(std::uint32_t block);
  void drop(Place& place);

  Device& device_;
  BlockFetcher& fetcher_;
  WeightPlacesOptions options_;
  Route route_;
  Update update_;
  std::vector<std::uint64_t> place_bytes_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> visits_;
  std::vector<std::uint8_t> filled_;  // by place: as plan_ counts on
  std::vector<VisitPlace> plan_;
  std::size_t cursor_ = 0;   // visits before it have been acquired
  std::size_t fetched_ = 0;  // visits before it need no more fetching
  Hits hits_;
};

}  // namespace spillway
