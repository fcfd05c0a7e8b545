// What the engine issues in a step, in its order, and what each operation waits for. Pure; private to the schedule.
//
// The caller's thread is a lane of its own: what it does is in program order, and whatever it issues starts no earlier
// than what it did last. The rules are those of the engine:
//
//  * Weights: what the engine's policy of weights (WeightResidency), told what happens here, answers.
//  * UpdateTurns, the engine's own: which tile is read, updated and written next. A block is updated when forward
//    acquires it, and its weights go to its place from there.
//  * AccumulatorPlaces: likewise, with AccumulatorResidency. Sums come when their block is acquired; those that were
//    added to before leave.
//  * GradientMemory, the engine's own object: a block's gradient goes down after the last visit that adds to it.
//  * Ranks: what others own of a block's weights is gathered when it is lent (GatheredPlaces), and what they own of its
//    sums goes to them when it is complete. One collective after the other, in that order.
//  * Engine: everything updated is settled, and committed, when the first backward visit is acquired. A block that is
//    updated inside backward is so after the visit after the one that completes its gradient, as its tiles come.
//
// Simpler than the engine: a read starts in the moment in which its buffer is free, not when the caller comes by and
// sees that; of a tile's weights as many chunks as they fill, half of all at most, are read, checked and copied
// together; a block's gradient has its staging for the whole visit, and its sums; the caller's own work between calls
// takes no time.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "src/plan/schedule.h"
#include "src/plan/update_turns.h"
#include "swap/policy/accumulator_residency.h"
#include "swap/policy/gathered_places.h"
#include "swap/policy/weight_residency.h"

namespace spillway {

constexpr double seconds_of(std::uint64_t bytes, double rate) {
  return rate > 0 ? static_cast<double>(bytes) / rate : 0;
}

class ScheduleProgram final : UpdateTurns {
 public:
  explicit ScheduleProgram(const ScheduleInput& input);

  // Appends a step that begins with the update of the step before it; returns the index of its kStep.
  std::uint32_t add_step();
  std::vector<ScheduleOp>& ops() { return ops_; }

 private:
  struct PlaceOps {
    std::uint32_t ready = kNoOp;     // the last copy to it
    std::uint32_t open = kNoOp;      // the last check of a fetch to it
    std::uint32_t released = kNoOp;  // the last visit that used it
  };
  struct Buffer {
    std::uint32_t read = kNoOp, updated = kNoOp, write = kNoOp, copy = kNoOp;
    std::uint32_t left() const {
      return write == kNoOp ? updated : write;
    }  // by its last tile, which copy may still read
  };
  // Fixed places that are used in turn; a user waits for what freed the place last.
  struct Ring {
    std::vector<std::uint32_t> freed;
    std::uint32_t used = 0;
    std::uint32_t take() { return freed.empty() ? kNothing : used++ % static_cast<std::uint32_t>(freed.size()); }
    std::uint32_t free_after(std::uint32_t place) const { return place == kNothing ? kNoOp : freed[place]; }
    void free_by(std::uint32_t place, std::uint32_t op) {
      if (place != kNothing) freed[place] = op;
    }
  };
  // A place of accumulators.
  struct Sums {
    std::uint32_t added = kNoOp;  // by this visit's compute, the last
    std::uint32_t free = kNoOp;   // others may use it after this
  };
  struct Use {
    std::uint32_t loaded = kNoOp;  // it is in its place
    std::uint32_t home = kNoOp;    // spilled: it is there
    std::uint32_t left = kNoOp;    // its place may be used by others
  };

  // What a link does takes what its bytes take there, whatever `op` says.
  std::uint32_t add(ScheduleOp op, std::initializer_list<std::uint32_t> after);
  double seconds_of_lane(const ScheduleOp& op) const;
  ScheduleOp of_tile(OpKind kind, Lane lane, std::uint32_t tile, std::uint64_t bytes) const {
    return {.kind = kind, .lane = lane, .block = in_.tiles[tile].block, .tile = tile, .bytes = bytes};
  }
  std::uint32_t last(Lane lane) const { return last_[static_cast<std::size_t>(lane)]; }
  void note_visits();
  void skip_early();

  void visit(std::uint32_t v);
  std::uint32_t end_step();
  // Weights
  std::uint32_t run_weights(std::uint32_t visit);
  ScheduleOp of_visit(std::uint32_t visit, std::uint32_t place) const;
  void fetch(std::uint32_t place, std::uint32_t block);
  void fetch_through_chunks(std::uint32_t tile, std::uint32_t place);
  // Updates
  void make(const TileMove& move) override;
  bool is_read(std::uint32_t) override { return true; }     // an update of it starts no earlier than it has been
  bool is_written(std::uint32_t) override { return true; }  // a read into it starts no earlier than it is
  std::optional<QueueEvent> landing(std::uint32_t block, bool wait) override;
  void work_on(const TileTurn& turn, bool delivers) override;
  void updated_early(std::uint32_t block) override;
  void read_tile(std::uint32_t tile, std::uint32_t buffer);
  void update(std::uint32_t tile, std::uint32_t buffer, Lane lane, std::uint32_t place);
  void finish_step();
  void commit();
  void agree(std::uint64_t calls);
  // Gradients
  void await_gradient(std::uint32_t block);
  std::uint32_t stage_gradient(std::uint32_t block);
  void complete_gradient(std::uint32_t block, std::uint32_t computed);
  std::uint32_t copy_gradient(std::uint32_t tile, const GradientDown& down, std::uint32_t computed);
  void spill_gradient(std::uint32_t tile, const GradientDown& down, std::uint32_t computed);
  std::uint32_t spills_written();
  void read_gradient(std::uint32_t tile, std::uint32_t buffer);
  // Other ranks
  std::uint32_t collective(OpKind kind, std::uint32_t block, const Collectives& of,
                           std::initializer_list<std::uint32_t> after);
  void gather(std::uint32_t visit, std::uint32_t place);
  std::uint32_t add_sums(std::uint32_t visit, std::uint32_t computed);
  void join();
  std::uint32_t bring_sums(std::uint32_t visit);
  void send_home(std::uint32_t block, std::uint32_t place);
  void add_to_sums(std::uint32_t visit, std::uint32_t computed);
  // Activations
  std::uint32_t compute(ScheduleOp op, std::uint32_t weights, std::uint32_t staging, std::uint32_t sums);
  void load_activations();
  void save_activation(std::uint32_t use);

  const ScheduleInput& in_;
  std::vector<ScheduleOp> ops_;
  std::array<std::uint32_t, kLanes> last_{};  // operation of each lane
  std::uint32_t issued_ = kNoOp;              // the caller's last

  std::vector<std::uint32_t> visit_blocks_;
  std::vector<std::uint8_t> completes_;  // by visit: its block's gradient

  std::vector<std::uint32_t> early_;  // blocks that are updated inside backward, as their gradients complete
  WeightResidency weights_;
  std::vector<PlaceOps> places_;
  GatheredPlaces gathered_;
  struct Waiting {
    std::uint32_t block = kNothing, computed = kNoOp;
  } waiting_;                               // for join()
  std::uint32_t scattered_ = kNoOp;         // the last sums
  std::uint64_t chunk_ = 0;                 // used so far
  std::vector<std::uint32_t> chunk_freed_;  // by chunk: the copy that freed it last

  std::vector<Buffer> buffers_;
  std::uint32_t delivered_to_ = kNothing;  // the place that the block that is asked for has
  std::uint32_t completing_ = kNothing;    // block: its gradient completes in this visit
  bool updating_ = true;                   // the last step's update is not settled
  std::vector<std::uint32_t> written_;     // by tile: its last write
  std::vector<std::uint32_t> spilled_;     // by tile: its gradient's last write
  bool backward_ = false;                  // it has begun
  std::vector<std::uint32_t> landed_;      // by tile: its gradient's copy down
  GradientMemory gradients_;
  std::vector<std::uint32_t> staging_copied_, staging_written_;  // by staging: the last copy and spill from it
  std::vector<std::uint32_t> passing_freed_;                     // the last update from there
  std::uint64_t spill_chunk_ = 0;                                // used so far
  std::vector<std::uint32_t> spill_freed_;                       // by chunk: the write that freed it last
  std::vector<std::uint32_t> sums_at_home_;                      // by block: by this copy
  std::vector<Sums> sums_;
  AccumulatorResidency sums_residency_;
  std::vector<Use> uses_;               // of activations, in this step
  std::uint32_t used_ = 0, loads_ = 0;  // uses before it: made, need no more loading
  Ring leaving_, coming_;               // activations on their way to NVMe, and back
};

}  // namespace spillway
