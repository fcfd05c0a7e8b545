// The optimizer's part of a step: every trainable tile, one by one (with several NUMA nodes, a tile on each at the same
// time), the next ones being read and the last ones being written meanwhile. One thread at a time.
// Errors: kIo, kCorrupt, kNonFinite (a result overflowed).
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/tile_update.h"
#include "src/checkpoint/tile_walk.h"
#include "src/engine/gradients.h"
#include "src/engine/parameter_updates.h"
#include "src/plan/plan.h"
#include "swap/policy/update_queue.h"
#include "swap/tile_mover.h"

namespace spillway {

class Updater {
 public:
  Updater(const Plan& plan, const ModelDescription& model, Device& device, HostWorkers& workers, TileMover& mover,
          GradientCollector& gradients, Stream& stream, Watch watch = {});

  // Inside backward, for blocks that are updated early: expect(blocks) ─► add(block) … ─► advance or make_room … ─►
  // advance(all). Nothing of it is seen before begin(): whoever fetches a block gets the weights of the step before.
  //
  // The gradients of these blocks will complete, in this order: their tiles are read meanwhile, as far as there are
  // buffers. Once in a step; what is added in another order costs what was read in vain.
  void expect(std::span<const std::uint32_t> blocks);
  // The block's gradient is complete.
  void add(std::uint32_t block, const ParameterUpdates& parameters);
  // Updates the tiles of added blocks that have been read and whose gradients have landed; the rest too when `all`.
  // From the first gradient that is not finite on, nothing is updated any more, nor behind a result that is not:
  // begin() refuses that one.
  void advance(bool all);
  // All of it, when the guess was right. False: it was not, or a result is not finite, and it is taken back.
  bool keep_early(bool right);
  // Updates the first added block, if blocks are updated, and forgets its gradient. False: there is none.
  bool make_room();
  bool early_under_way() const { return queue_.early_under_way(); }
  // Takes back what was updated early.
  void take_back();

  // begin ─► run_until(block) … ─► finish: the rest of the step's update, as far as it is asked for. What `parameters`
  // take, and the gradients, must stay as they are until it is finished. What lives in HBM is updated in begin() as a
  // whole.
  void begin(const ParameterUpdates& parameters);
  // The same at a resume, for the update that the last commit is the result of: the tiles that nobody has read are read
  // as for an update, verified and handed on as if they were its results. Nothing of them is written.
  void begin_check();
  bool checking() const noexcept { return queue_.checking(); }
  bool begun() const noexcept { return queue_.begun(); }
  WeightsFrom weights_from(std::uint32_t block) const { return queue_.weights_from(block); }
  // Updates the block's tiles and those before them in order. `to`, unless null, is the device address of the block's
  // place: its weights are copied there on the h2d stream, tile by tile. False: they were not, or not all.
  bool run_until(std::uint32_t block, std::byte* to);
  // Blocks until what was updated of the block can be read from where it lives.
  void settle(std::uint32_t block);
  // From here to finish() every tile passes `work`, in order and as it is afterwards; those that are not updated (any
  // more) are read for it. What it throws ends the looking, but not the update, and finish() returns it: the caller's
  // own failure, a full disk say, and none of the mover's.
  void look(TileWork work);
  // Shows the tiles up to the block's last that have no update, as far as they come next: so the looking keeps pace
  // with a forward pass that updates nothing.
  void show_until(std::uint32_t block);
  // Updates what is left and blocks until everything is where it lives.
  std::exception_ptr finish();

  // Starts reading the first tiles; the next begin() finds them on their way.
  void read_ahead();

  // Drops what read_ahead() brought: the buffers are needed for something else.
  void cancel_read_ahead();

  bool overflowed() const noexcept { return overflowed_; }  // a result was not finite: what was updated is of no use

  double adam_seconds() const noexcept { return adam_seconds_; }  // all runs together

 private:
  void start_loads();
  void make(const TileMove& move);
  void make_moves(Moves allowed);
  void update_early(const TileTurn& turn);
  void take_turn(const TileTurn& turn, std::byte* to);
  void run_on_device(const ParameterUpdates& parameters);
  void end_look();
  void finish_saves();
  void show(std::uint32_t tile, const TileMemory& memory);
  void wait_read(std::uint32_t buffer);
  void update(const TileTurn& turn, std::byte* to);
  void end_tile(std::size_t position, bool finite, std::byte* to);
  // Of the tile's first element in the weights, and in the gradient, of its block.
  std::uint64_t byte_offset(std::uint32_t tile) const;
  [[noreturn]] void refuse_overflow(const std::string& where);

  const Plan& plan_;
  const ModelDescription& model_;
  Device& device_;
  HostWorkers& workers_;
  TileMover& mover_;
  GradientCollector& gradients_;
  Stream& stream_;
  const Watch watch_;
  const unsigned nodes_;                    // so many tiles are updated at the same time
  const std::vector<std::uint32_t> order_;  // trainable tiles
  UpdateQueue queue_;
  bool overflowed_ = false;
  TileWork look_;  // to whom tiles are shown, and what went wrong there
  std::exception_ptr look_failure_;
  const ParameterUpdates* parameters_ = nullptr;
  std::vector<TileUpdate> updates_;              // those under way, by node
  std::vector<std::vector<GroupRange>> ranges_;  // ditto: where they are not the plan's
  std::vector<TileMemory> memories_;             // ditto
  std::vector<std::uint8_t> finite_;             // ditto: results
  double adam_seconds_ = 0;
};

}  // namespace spillway
