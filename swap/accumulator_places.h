// Places in HBM for the fp32 sums of blocks whose gradients come in several parts of a step, with other blocks' between
// them: while others are added to, a sum lies at home in host memory.
//
//   expect ─► h2d: home → a place          while the block computes; the sums of the blocks before leave meanwhile
//   acquire ─► the stream waits for it     the caller adds to it, or reads it, in stream order
//   complete ─► the place is free          after what the stream was given before
//
// Blocks may come in any order; which place they get is decided by policy/accumulator_residency.h. The adding is done
// by src/engine/gradients. One thread at a time (the engine's). Nothing is allocated after construction, and the host
// waits only in wait_idle().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/device.h"
#include "swap/policy/accumulator_residency.h"
#include "swap/timeline.h"

namespace spillway {

class AccumulatorPlaces {
 public:
  // `homes`: a block's, in registered host memory; empty for a block that does not come here. `places`: in HBM; each
  // block fits one of them.
  AccumulatorPlaces(Device& device, Stream& h2d, Stream& d2h, std::vector<std::span<std::byte>> places,
                    std::vector<std::span<std::byte>> homes, Timeline* timeline = nullptr);

  // Sums are lost. Nothing of them may be under way: wait_idle().
  void begin_step();
  // The block will be acquired next.
  void expect(std::uint32_t block);
  // Makes `stream` wait for the block's sums and returns where they are. Until complete() it holds what was written
  // there; before that, anything. Valid until the next call.
  float* acquire(std::uint32_t block, Stream& stream);
  // What `stream` has been given so far is all that is done with the sums.
  void complete(std::uint32_t block, Stream& stream);
  // Blocks until nothing is under way to a place or to a home.
  void wait_idle();

  std::uint64_t h2d_bytes() const noexcept { return h2d_bytes_; }
  std::uint64_t d2h_bytes() const noexcept { return d2h_bytes_; }

 private:
  struct Home {
    std::span<std::byte> memory;
    std::unique_ptr<Event> come;  // what was sent is there
  };
  struct HbmPlace {
    std::span<std::byte> memory;
    std::unique_ptr<Event> used, come;  // by the stream; the block's sums are there
    Event* free = nullptr;              // `used`, or when the last block left: others may write to it from then on
    Stream* stream = nullptr;           // of what was done last
  };

  std::uint32_t bring(std::uint32_t block);
  void send_home(std::uint32_t block, HbmPlace& place);
  void fetch(std::uint32_t block, HbmPlace& place);

  Device& device_;
  Stream& h2d_;
  Stream& d2h_;
  Timeline* timeline_;
  std::vector<HbmPlace> places_;
  std::vector<Home> homes_;  // by block
  AccumulatorResidency residency_;
  std::uint64_t h2d_bytes_ = 0, d2h_bytes_ = 0;
};

}  // namespace spillway
