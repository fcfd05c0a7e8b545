// The HBM places of blocks on loan, and what is on its way to each place. It does what WeightResidency answers, and
// decides nothing: which block has which place is known there. Its own are the places and their events; the bytes are
// moved by the BlockFetcher, or by an update that copies its result there (begin_copies(), end_copies()).
//
// One thread at a time (the engine's). Errors: kIo and kCorrupt from a fetch.
// Read next: block_fetcher.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "swap/block_fetcher.h"

namespace spillway {

struct WeightPlacesOptions {
  std::vector<std::span<std::byte>> places = {};  // in HBM
  std::size_t max_pieces = 0;                     // tiles of the largest block
  std::size_t max_granules = 0;                   // granules of its weights on NVMe, all tiles together
  bool poison_released = false;
};

class WeightPlaces {
 public:
  // `fetcher`: null where the weights live in the places, so that nothing but an update ever writes there.
  WeightPlaces(Device& device, Stream& h2d, BlockFetcher* fetcher, const WeightPlacesOptions& options);

  std::span<std::byte> memory(std::uint32_t place) const { return options_.places[place]; }

  // Empty: to be filled with the pieces of the fetch to the place that is started next.
  std::vector<FetchPiece>& pieces(std::uint32_t place);
  // After all work under leases of the place. Whoever starts a fetch waits for it, or drains it, before this goes.
  void start_fetch(std::uint32_t place);
  void wait_fetch(std::uint32_t place);
  // Blocks until it is over, whatever comes of it.
  void drain(std::uint32_t place);
  // Around what copies a block's weights to the place on the h2d stream and is no fetch.
  void begin_copies(std::uint32_t place);
  void end_copies(std::uint32_t place);

  // Makes `stream` wait for what has come to the place.
  void open(std::uint32_t place, Stream& stream);
  // `stream`: has come by all work under leases of the place, once it has run what is on it.
  void release(std::uint32_t place, Stream& stream);

 private:
  struct HbmPlace {
    std::unique_ptr<BlockFetch> fetch;
    std::unique_ptr<Event> released;
  };
  Event* released(std::uint32_t place) const;

  Device& device_;
  Stream& h2d_;
  BlockFetcher* const fetcher_;
  const WeightPlacesOptions options_;
  std::vector<HbmPlace> places_;
};

}  // namespace spillway
