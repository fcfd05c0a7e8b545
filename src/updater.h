// The optimizer's part of a step: every trainable tile, one by one (with several NUMA nodes, a tile on each at the same
// time), the next ones being read and the last ones being written meanwhile. One thread at a time.
// Errors: kIo, kCorrupt, kNonFinite (a result overflowed).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tile_update.h"
#include "spillway/optimizer.h"
#include "src/gradients.h"
#include "src/plan.h"
#include "swap/tile_mover.h"

namespace spillway {

class Updater {
 public:
  Updater(const Plan& plan, const ModelDescription& model, Device& device, HostWorkers& workers, TileMover& mover,
          GradientCollector& gradients, Stream& stream);

  // begin ─► run_until(block) … ─► finish: a step's update, as far as it is asked for. `scalars`, by parameter group,
  // and the gradients must stay as they are until it is finished. What lives in HBM is updated in begin() as a whole.
  void begin(std::span<const OptimizerScalars> scalars);
  bool under_way() const noexcept { return next_ < order_.size(); }
  bool awaited(std::uint32_t block) const { return next_ < block_end_[block]; }  // it still has the weights before
  // Updates the block's tiles and those before them in order. `to`, unless null, is the device address of the block's
  // place: its weights are copied there on the h2d stream, tile by tile. False: they were not, or not all.
  bool run_until(std::uint32_t block, std::byte* to);
  // Blocks until what was updated of the block can be read from where it lives.
  void settle(std::uint32_t block);
  // Updates what is left and blocks until everything is where it lives.
  void finish();

  // Starts reading the first tiles; the next begin() finds them on their way. Call at most once before each.
  void read_ahead();

  // Drops what read_ahead() brought: the buffers are needed for something else.
  void cancel_read_ahead();

  double adam_seconds() const noexcept { return adam_seconds_; }  // all runs together

 private:
  void run_on_device(std::span<const OptimizerScalars> scalars);
  void start_loads(std::size_t due, std::size_t count);
  void update(std::size_t first, std::size_t count, std::byte* to);
  // Of the tile's first element in the weights, and in the gradient, of its block.
  std::uint64_t byte_offset(std::uint32_t tile) const;
  [[noreturn]] void overflowed(const std::string& where) const;

  const Plan& plan_;
  const ModelDescription& model_;
  Device& device_;
  HostWorkers& workers_;
  TileMover& mover_;
  GradientCollector& gradients_;
  Stream& stream_;
  const unsigned nodes_;                              // so many tiles are updated at the same time
  const std::vector<std::uint32_t> order_;            // trainable tiles
  std::vector<std::size_t> block_begin_, block_end_;  // of each block's tiles in order_
  std::span<const OptimizerScalars> scalars_;
  std::size_t next_ = 0;              // tiles of order_ before it are updated; all of them while no update is under way
  std::vector<TileUpdate> updates_;   // those under way, by node
  std::vector<std::uint8_t> finite_;  // ditto: results
  std::size_t loading_ = 0;           // tiles of order_ before it have been started to load
  double adam_seconds_ = 0;
};

}  // namespace spillway
