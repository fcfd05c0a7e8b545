// Does what the turns of an update ask for, on the drive, in host memory and by the kernels: loads, gradients, updates,
// checks and saves. Which tile comes when is not decided here but by UpdateQueue (swap/policy/update_queue.h), in the
// order of UpdateTurns (src/plan/update_turns.h). On the way it shows every tile, as it is after the update, to an
// export or to a snapshot that goes on during the next forward pass. One thread at a time. Errors: kIo, kCorrupt,
// kNonFinite (a result overflowed). Read next: swap/tile_mover.h, kernels/tile_update.h.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "kernels/tile_update.h"
#include "spillway/error.h"
#include "src/engine/gradients.h"
#include "src/engine/parameter_updates.h"
#include "src/plan/plan.h"
#include "src/plan/update_turns.h"
#include "swap/tile_mover.h"
#include "swap/tile_walk.h"

namespace spillway {

// A weight or state of `where` came out infinite or NaN.
Error update_overflow(const std::string& where);

class TileExecutor final : public UpdateTurns {
 public:
  TileExecutor(const Plan& plan, const ModelDescription& model, const UpdateQueueOptions& queue, HostWorkers& workers,
               TileMover& mover, GradientCollector& gradients, Watch watch = {});

  // Drops what was read ahead: the buffers are needed for something else.
  void cancel_read_ahead();

  // What the turns from here on update by; must stay as it is until they are over.
  void update_by(const ParameterUpdates& parameters) { parameters_ = &parameters; }
  // `to`, unless null, is the device address of the block's place: its weights are copied there on the h2d stream, tile
  // by tile. False: they were not, or not all.
  bool run_until(std::uint32_t block, std::byte* to);

  // From here to reset() every tile passes `work`, as it is after its turn. What `work` throws ends that, but not the
  // update.
  void begin_tour(TileWork work);
  // Shows the tiles up to the block's last that have no update, as far as they come next: so the showing keeps pace
  // with a forward pass that updates nothing.
  void tour_until(std::uint32_t block);
  // What `work` has thrown: the caller's own failure, a full disk say, and none of the mover's.
  std::exception_ptr end_tour() { return std::exchange(show_failure_, nullptr); }

  // The step's queue is over, and everything is where it lives.
  void reset();

  bool overflowed() const noexcept { return overflowed_; }        // what was updated is of no use
  [[noreturn]] void refuse_overflow(std::uint32_t tile);          // notes it, and throws
  double adam_seconds() const noexcept { return adam_seconds_; }  // all turns together

 private:
  void make(const TileMove& move) override;
  bool is_read(std::uint32_t buffer) override { return mover_.read(buffer); }
  bool is_written(std::uint32_t buffer) override { return mover_.idle(buffer); }
  std::optional<QueueEvent> landing(std::uint32_t block, bool wait) override;
  void work_on(const TileTurn& turn, bool delivers) override;
  void updated_early(std::uint32_t block) override { gradients_.forget(block); }
  void wait_read(std::uint32_t buffer);
  void prepare(std::size_t node, std::uint32_t tile, std::uint32_t buffer);
  void update(const TileTurn& turn, std::byte* to);
  void visit(std::uint32_t tile, const TileMemory& memory);
  void end_tile(std::size_t position, bool finite, std::byte* to);

  const Plan& plan_;
  const ModelDescription& model_;
  HostWorkers& workers_;
  TileMover& mover_;
  GradientCollector& gradients_;
  const Watch watch_;
  const unsigned nodes_;     // so many tiles are updated at the same time
  std::byte* to_ = nullptr;  // the place that run_until() was asked to bring weights to
  TileWork tour_work_;       // null: nobody looks, or nobody any more
  std::exception_ptr show_failure_;
  const ParameterUpdates* parameters_ = nullptr;
  std::vector<TileUpdate> updates_;              // those under way, by node
  std::vector<std::vector<GroupRange>> ranges_;  // ditto: where they are not the plan's
  std::vector<TileMemory> memories_;             // ditto
  std::vector<std::uint8_t> finite_;             // ditto: results
  bool overflowed_ = false;
  double adam_seconds_ = 0;
};

}  // namespace spillway
