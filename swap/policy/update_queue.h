// Which tile of an update is read, updated and written next, in which buffer, and which version of a block's weights is
// readable meanwhile. Pure: no thread, file, clock or device. It is told what has happened and says what is to be done;
// the updater does it on files and devices, the schedule on its virtual clock, so that the rules are here alone.
//
//   tell(what happened) ─► next_turn(which) ─► next_move … until the turn's tiles are there ─► end_tile … ─►
//   tell(kTurnDone)
//
// Tiles pass through the buffers in turn, three of them here; a tile that lies in host memory (m) is updated in place,
// and only its place in the queue is waited for:
//
//   queue    7 8 9 ║ 0 m 1 2 3 m m 4 5 6   blocks updated inside backward, as their gradients complete ║ then the rest
//   buffer   0 1 2   0   1 2 0 …
//            ▲ next        ▲ loading       those between are read ahead; a buffer's next tile comes once it is written
//
// The queue lasts for one step: kEnd makes it empty. Nothing is allocated after construction, but for a tour (kTour).
// Read next: src/plan/update_turns.h, which asks these questions in order, and src/engine/tile_executor.h, which acts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace spillway {

struct UpdateQueueOptions {
  struct Block {
    std::uint32_t first_tile = 0, tiles = 0;
  };
  std::vector<Block> blocks = {};
  std::vector<std::uint8_t> trainable = {};  // by tile
  std::vector<std::uint32_t> order = {};     // trainable tiles, as they are updated
  std::vector<std::uint32_t> checked = {};   // those that a check at a resume reads
  // By tile: it is updated where it lies, and needs no buffer. Empty: none is.
  std::vector<std::uint8_t> in_place = {};
  std::uint32_t buffers = 1;
  unsigned nodes = 1;                             // so many tiles are updated together, but for those inside backward
  bool reads_ahead = true, writes_behind = true;  // of the tile being updated
  bool early_planned = false;  // blocks are updated inside backward in every step: none of the rest is read before

  // Buffers, and numbers after them for what is updated in place.
  std::uint32_t numbers() const noexcept { return in_place.empty() ? buffers : 2 * buffers; }
};

enum class QueueEvent : std::uint8_t {
  kComplete,    // block: its gradient is complete, and it is to be updated inside backward
  kLanded,      // block: its gradient is where the update reads it
  kNotFinite,   // the same, but it is not finite: from its turn on, nothing is updated inside backward
  kRead,        // buffer: nothing of its tile is on its way from NVMe any more
  kWritten,     // buffer: its save is done
  kFetched,     // nothing more is fetched in this step: its update's first tiles may be read
  kTurnDone,    // of the last turn
  kBegin,       // every gradient is there: the rest of the update may be made
  kBeginCheck,  // ditto of the update that the last commit is the result of: it is read and verified again
  kTour,        // from here on every tile passes, in the model's order, with its update if it still has one
  kEndTour,     // only those that have one
  kCancel,      // what is read ahead is dropped
  kEnd,
};

struct TileMove {
  enum class Kind : std::uint8_t {
    kLoad,
    kGradient,  // of a tile that is being loaded: from NVMe if it was spilled
    kDrop,      // what is loaded, or on its way, is not used
  };
  Kind kind = Kind::kLoad;
  std::uint32_t tile = 0, buffer = 0;
  bool operator==(const TileMove&) const = default;
};

// What next_move() may return. Drops come before all else, and a gradient before another tile.
enum class Moves : std::uint8_t { kDrops, kGradients, kAll };

// Tiles whose turn is asked for.
enum class Turns : std::uint8_t {
  kUntil,     // those of the block, and whatever stands before them
  kRest,      // all
  kShown,     // as far as the block's last in the model's order: those that come next and have no update
  kEarly,     // inside backward: those that have been read and whose gradients have landed
  kEarlyAll,  // those whose gradients are complete; their landing is waited for
  kEarlyOf,   // ditto, of the block alone, even when nothing is updated any more
};

struct TileTurn {
  enum class Kind : std::uint8_t {
    kUpdate,
    kCheck,     // it is verified, and handed on as if it were updated
    kVisit,     // it is not updated, and only looked at
    kPassOver,  // it would be updated, but the step comes to nothing
  };
  Kind kind = Kind::kUpdate;
  std::size_t first = 0, count = 1;  // in the queue
  std::uint32_t block = 0;           // of the first
  bool ends_block = false;
  bool operator==(const TileTurn&) const = default;
};

// What becomes of a tile, and of its buffer, after its turn.
enum class TileEnd : std::uint8_t {
  kSave,
  kSaveNow,   // and wait for it
  kRestored,  // it is at home: nothing is written
  kDrop,
  kRefuse,  // a result is not finite: the step has failed
};

// What a block's weights are read from.
enum class WeightsFrom : std::uint8_t {
  kNewest,     // what was written of them last
  kCommitted,  // the last commit: what is updated inside backward is not seen before the step
  kUpdate,     // they come from their update, which has not been made
};

// Of an update, for whoever hands out weights meanwhile.
class UpdateView {
 public:
  virtual bool begun() const = 0;  // every gradient is there, and not all of it is where it lives
  virtual WeightsFrom weights_from(std::uint32_t block) const = 0;

 protected:
  ~UpdateView() = default;
};

class UpdateQueue final : public UpdateView {
 public:
  explicit UpdateQueue(UpdateQueueOptions options);

  // The gradients of these blocks will complete in this order: their tiles are read meanwhile. Once in a step; what
  // completes in another order costs what was read in vain. False: nothing new is expected.
  bool expect(std::span<const std::uint32_t> blocks);
  // `subject`: the event's block or buffer.
  void tell(QueueEvent event, std::uint32_t subject = 0);

  // The next move, which is made with that. A load waits for its buffer's save only when its tile's turn has come.
  std::optional<TileMove> next_move(Moves allowed);
  // The next turn; nothing when there is none (yet) of these. `block`: of kUntil, kShown and kEarlyOf.
  std::optional<TileTurn> next_turn(Turns which, std::uint32_t block = 0);
  // Of the tile at a position of the turn, when it is done. `delivered`: its weights are wanted at their block's place.
  TileEnd end_tile(std::size_t position, bool finite, bool delivered);

  std::uint32_t tile(std::size_t position) const { return queue_[position]; }
  // Of options.numbers().
  std::uint32_t buffer(std::size_t position) const;

  WeightsFrom weights_from(std::uint32_t block) const override;
  // The block's tiles have their turns in one piece, so that its weights may go to its place from there.
  bool delivers(std::uint32_t block) const;

  bool begun() const noexcept override { return begun_; }
  bool checking() const noexcept { return checking_; }
  bool touring() const noexcept { return touring_; }
  bool under_way() const noexcept { return next_ < queue_.size(); }
  bool early_under_way() const noexcept { return !begun_ && early_end_ > 0; }
  bool stopped() const noexcept { return stopped_; }   // nothing is updated inside backward any more
  bool touched() const noexcept { return next_ > 0; }  // tiles have had their turn
  std::optional<std::uint32_t> overflow() const noexcept { return early_overflow_; }  // tile with such a result

  // What is to be looked after before the next question: the block that is updated inside backward next; the buffer
  // that the next tile is being read into; the one whose save the next load waits for.
  std::optional<std::uint32_t> early_block() const;
  std::optional<std::uint32_t> reading() const;
  std::optional<std::uint32_t> saving() const;

 private:
  void append(std::uint32_t tile);
  void append_block(std::uint32_t block);
  void fill();
  void complete(std::uint32_t block);
  void forget_expected();
  void cancel(std::size_t begin);
  void stop();
  void end_turn();
  void begin_check();
  void begin_tour();
  void end_tour();
  void place_blocks();
  void count_passing(std::size_t begin);
  void reset();
  bool arrived() const;
  bool in_place(std::size_t position) const;
  std::optional<TileMove> next_gradient();
  bool is_updated(std::uint32_t tile) const { return updated_.empty() || updated_[tile] != 0; }

  const UpdateQueueOptions options_;
  std::vector<std::uint32_t> block_of_;  // by tile
  std::vector<std::uint32_t> queue_;
  std::vector<std::uint32_t> passing_;             // by position: tiles before it that need a buffer
  std::vector<std::size_t> first_of_, end_of_;     // of each block's tiles in the queue; end 0: not in it
  std::vector<std::uint8_t> landed_, not_finite_;  // by block
  std::vector<std::uint8_t> read_, saving_;        // by buffer
  std::vector<std::uint32_t> drops_;               // buffers, in order
  std::size_t early_end_ = 0;                      // tiles of the queue before it are complete
  bool expected_ = false;                          // those after it are expected; else it is their turn after kBegin
  std::size_t next_ = 0;                           // ditto: have had their turn
  std::size_t due_ = 0;                            // so many from there on have it now
  std::size_t loading_ = 0;                        // ditto: have been started to load, where they need a buffer
  bool placed_ = false;                            // the one whose turn it is has, and lies in place
  std::size_t gradients_ = 0;                      // ditto: with their gradients
  bool begun_ = false, checking_ = false, touring_ = false, stopped_ = false;
  std::optional<std::uint32_t> early_overflow_;
  std::vector<std::uint8_t> updated_;  // by tile, on a tour: it has an update; empty: all of the queue have
};

}  // namespace spillway
