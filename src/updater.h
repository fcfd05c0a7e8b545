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

  void run(std::span<const OptimizerScalars> scalars);  // by parameter group
  // Starts reading the first tiles; run() then finds them on their way. Call at most once before each run().
  void read_ahead();

  // Drops what read_ahead() brought: the buffers are needed for something else.
  void cancel_read_ahead();

  double adam_seconds() const noexcept { return adam_seconds_; }  // all runs together

 private:
  void run_on_device(std::span<const OptimizerScalars> scalars);
  void start_loads(std::size_t due, std::size_t count);
  void update(std::size_t first, std::size_t count, std::span<const OptimizerScalars> scalars);
  [[noreturn]] void overflowed(const std::string& where) const;

  const Plan& plan_;
  const ModelDescription& model_;
  Device& device_;
  HostWorkers& workers_;
  TileMover& mover_;
  GradientCollector& gradients_;
  Stream& stream_;
  const unsigned nodes_;                    // so many tiles are updated at the same time
  const std::vector<std::uint32_t> order_;  // trainable tiles
  std::vector<TileUpdate> updates_;         // those under way, by node
  std::vector<std::uint8_t> finite_;        // ditto: results
  std::size_t loading_ = 0;                 // how many of them have been started in this run
  double adam_seconds_ = 0;
};

}  // namespace spillway
