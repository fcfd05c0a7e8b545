// How an update goes, once for the engine and for the schedule: what its queue is told, which turns are taken when, and
// what is read before and after each. UpdateQueue says which tile is next. Whoever derives from this does what comes
// of it: TileExecutor on files and devices, ScheduleProgram on its virtual clock.
//
//   expect ─► complete(block) … ─► advance or make_room … ─► begin ─► run_until(block) … ─► run_rest
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "swap/policy/update_queue.h"

namespace spillway {

class UpdateTurns {
 public:
  explicit UpdateTurns(UpdateQueueOptions options) : queue_(std::move(options)) {}
  UpdateTurns(const UpdateTurns&) = delete;
  UpdateTurns& operator=(const UpdateTurns&) = delete;

  const UpdateQueue& queue() const noexcept { return queue_; }

  // Inside backward. These blocks' gradients will complete in this order; a block's is complete.
  void expect(std::span<const std::uint32_t> blocks);
  void complete(std::uint32_t block);
  // Updates the tiles of complete blocks that have been read and whose gradients have landed; the rest too when `all`.
  void advance(bool all);
  // Updates the first complete block, so that the memory of its gradient is free. False: there is none.
  bool make_room();

  // Nothing more is fetched in this step: the first tiles of its update are read.
  void read_ahead();
  // Every gradient is there.
  void begin();
  // The same at a resume, for the update that the last commit is the result of: the tiles that nobody has read are read
  // as for an update, verified and handed on as if they were its results. Nothing of them is written.
  void begin_check();
  // Updates the block's tiles and those before them in order. `wanted`: its weights, at its place. False: they do not
  // come there, or not all.
  bool run_until(std::uint32_t block, bool wanted);
  void run_rest();

 protected:
  ~UpdateTurns() = default;

  // Starts what may be read now: until the next load has to wait for its buffer's save.
  void start_loads();
  void make_moves(Moves allowed);
  // `delivers`: the weights of its tiles go to their block's place.
  void take_turn(const TileTurn& turn, bool delivers);

  virtual void make(const TileMove& move) = 0;
  virtual bool is_read(std::uint32_t buffer) = 0;
  virtual bool is_written(std::uint32_t buffer) = 0;
  // kLanded or kNotFinite; nothing while the block's gradient is on its way, but never when `wait`.
  virtual std::optional<QueueEvent> landing(std::uint32_t block, bool wait) = 0;
  // Each of its tiles, to end_tile().
  virtual void work_on(const TileTurn& turn, bool delivers) = 0;
  // All of the block, inside backward.
  virtual void updated_early(std::uint32_t block) = 0;

  UpdateQueue queue_;

 private:
  bool note_landing(std::uint32_t block, bool wait);
  void take_early(const TileTurn& turn);
};

}  // namespace spillway
