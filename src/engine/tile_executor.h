// Does on the drive, in host memory and by the kernels what the queue of an update says: loads, gradients, updates,
// checks and saves. Several ask for turns of the same queue (EarlyUpdate, Updater, TileTour); all of them are taken
// here. One thread at a time. Errors: kIo, kCorrupt, kNonFinite (a result overflowed).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/tile_update.h"
#include "spillway/error.h"
#include "src/engine/gradients.h"
#include "src/engine/parameter_updates.h"
#include "src/plan/plan.h"
#include "swap/policy/update_queue.h"
#include "swap/tile_mover.h"

namespace spillway {

// A weight or state of `where` came out infinite or NaN.
Error update_overflow(const std::string& where);

class TileExecutor {
 public:
  TileExecutor(const Plan& plan, const ModelDescription& model, UpdateQueueOptions queue, HostWorkers& workers,
               TileMover& mover, GradientCollector& gradients, Watch watch = {});

  UpdateQueue& queue() noexcept { return queue_; }
  const UpdateQueue& queue() const noexcept { return queue_; }

  // Starts what may be read now: until the next load has to wait for its buffer's save.
  void start_loads();
  // Gradients of tiles that were read before: from NVMe, as far as they were spilled.
  void start_gradients() { make_moves(Moves::kGradients); }
  // Drops what was read ahead: the buffers are needed for something else.
  void cancel_read_ahead();

  // What the turns from here on update by; must stay as it is until they are over.
  void update_by(const ParameterUpdates& parameters) { parameters_ = &parameters; }
  // `to`, unless null, is the device address of the place of the turn's block: the tiles' weights are copied there on
  // the h2d stream.
  void take_turn(const TileTurn& turn, std::byte* to);
  // From here to reset() every tile passes `watcher`, as it is behind its turn. False: it has seen enough.
  void show_to(std::function<bool(std::uint32_t tile, const TileMemory& memory)> watcher);

  void finish_saves();
  // The step's queue is over, and everything is where it lives.
  void reset();

  bool overflowed() const noexcept { return overflowed_; }        // what was updated is of no use
  [[noreturn]] void refuse_overflow(std::uint32_t tile);          // notes it, and throws
  double adam_seconds() const noexcept { return adam_seconds_; }  // all turns together

 private:
  void make(const TileMove& move);
  void make_moves(Moves allowed);
  void wait_read(std::uint32_t buffer);
  void prepare(std::size_t node, std::uint32_t tile, std::uint32_t buffer);
  void update(const TileTurn& turn, std::byte* to);
  void show(std::uint32_t tile, const TileMemory& memory);
  void end_tile(std::size_t position, bool finite, std::byte* to);

  const Plan& plan_;
  const ModelDescription& model_;
  HostWorkers& workers_;
  TileMover& mover_;
  GradientCollector& gradients_;
  const Watch watch_;
  const unsigned nodes_;  // so many tiles are updated at the same time
  UpdateQueue queue_;
  std::function<bool(std::uint32_t tile, const TileMemory& memory)> watcher_;
  bool seen_enough_ = false;
  const ParameterUpdates* parameters_ = nullptr;
  std::vector<TileUpdate> updates_;              // those under way, by node
  std::vector<std::vector<GroupRange>> ranges_;  // ditto: where they are not the plan's
  std::vector<TileMemory> memories_;             // ditto
  std::vector<std::uint8_t> finite_;             // ditto: results
  bool overflowed_ = false;
  double adam_seconds_ = 0;
};

}  // namespace spillway
