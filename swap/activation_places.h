// The HBM places of activations: leases, and their way to their homes and back along the planned uses of a step.
//
//   release ─► d2h: HBM → host memory, or → chunk → NVMe       as soon as the last use before it leaves is over
//   prefetch ─► h2d: the way back, verified                    as soon as the place it is planned for is free
//
// Which place a use gets was decided when the run was planned (policy/activation_residency.h). One thread at a time
// (the engine's). Nothing is allocated after construction. Errors: kInvalidArgument for a use out of the planned order,
// with nothing changed; kIo and kCorrupt from the drive: what the activations hold is lost then.
// Read next: block_spiller.h for the way out, block_fetcher.h for the way back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "swap/block_fetcher.h"
#include "swap/block_spiller.h"
#include "swap/policy/activation_residency.h"

namespace spillway {

// Where an activation goes when it leaves HBM. Neither: it never does.
struct ActivationHome {
  std::byte* host = nullptr;  // in registered host memory
  Extent extent = {};         // on NVMe; scratch
};

struct ActivationPlacesOptions {
  std::vector<std::span<std::byte>> places;  // in HBM
  std::vector<std::uint64_t> bytes;          // of each activation
  // Empty: nothing moves, activation i has place i for itself, and uses may come in any order.
  std::vector<ActivationUse> uses;
  std::vector<UsePlace> plan;         // index as uses
  std::vector<ActivationHome> homes;  // index as bytes
};

class ActivationPlaces {
 public:
  // Null fetcher and spiller: nothing moves.
  ActivationPlaces(Device& device, BlockFetcher* fetcher, BlockSpiller* spiller, ActivationPlacesOptions options);
  ~ActivationPlaces();
  ActivationPlaces(const ActivationPlaces&) = delete;
  ActivationPlaces& operator=(const ActivationPlaces&) = delete;

  // What activations held is lost.
  void begin_step();
  // Makes `stream` wait for the activation and returns its place. Blocks while reads and writes are late.
  std::uint32_t acquire(std::uint32_t activation, Access access, Stream& stream);
  // `stream`: as of WeightPlaces::release(). Also throws what a write before it met.
  void release(std::uint32_t place, Stream& stream);

  std::byte* address(std::uint32_t place) const { return options_.places[place].data(); }
  bool leased() const;
  bool lends(std::span<const std::byte> memory) const;  // all of it lies in one place that is leased

 private:
  struct HbmPlace {
    std::unique_ptr<BlockFetch> fetch;
    std::unique_ptr<BlockSpill> spill;
    std::unique_ptr<Event> released;
    Event* last = nullptr;  // the place may be used from then on: its bytes have come, were read or written, or left
    std::optional<std::uint32_t> activation;  // it holds, or is being given
    std::uint32_t spilled = 0;                // activation of the spill, when `spilling`
    bool fetching = false, spilling = false;  // started, and not yet waited for
    std::size_t use = 0;                      // the last one acquired
    std::uint32_t leases = 0;
  };
  struct Absent {                               // an activation that left HBM
    std::optional<std::uint32_t> spilled_from;  // place by whose spill it last went home
    std::uint64_t checksum = 0;                 // on NVMe
  };

  bool moves() const { return !options_.uses.empty(); }
  void check_use(std::uint32_t activation, Access access);
  [[noreturn]] void refuse(std::uint32_t activation, const std::string& happened, const std::string& hint) const;
  std::optional<Error> wait_idle();
  void prefetch();
  bool ready_for(std::size_t use) const;
  void start_fetch(std::size_t use);
  void bring(std::size_t use);
  void start_spill(HbmPlace& place);
  void finish_spill(HbmPlace& place);

  Device& device_;
  BlockFetcher* fetcher_;
  BlockSpiller* spiller_;
  const ActivationPlacesOptions options_;
  std::vector<HbmPlace> places_;
  std::vector<Absent> absent_;
  std::size_t cursor_ = 0;   // uses before it have been acquired
  std::size_t fetched_ = 0;  // uses before it need no more fetching
};

}  // namespace spillway
