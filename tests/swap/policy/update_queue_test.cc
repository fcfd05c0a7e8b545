#include "swap/policy/update_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/seed.h"

namespace spillway {
namespace {

UpdateQueueOptions three_blocks() {
  UpdateQueueOptions options{.blocks = {{0, 2}, {2, 3}, {5, 2}}, .trainable = {1, 1, 1, 1, 1, 1, 1}, .buffers = 3};
  for (std::uint32_t t = 0; t < 7; ++t) options.order.push_back(t);
  return options;
}

std::string text(const TileMove& move) {
  const char* const kinds[] = {"load ", "gradient ", "drop"};
  const std::string in = " in " + std::to_string(move.buffer);
  const bool drop = move.kind == TileMove::Kind::kDrop;
  return kinds[static_cast<int>(move.kind)] + (drop ? std::string() : std::to_string(move.tile)) + in;
}

std::vector<std::string> moves(UpdateQueue& queue, Moves allowed = Moves::kAll) {
  std::vector<std::string> made;
  while (const auto move = queue.next_move(allowed)) made.push_back(text(*move));
  return made;
}

void update(UpdateQueue& queue, const TileTurn& turn) {
  for (std::size_t i = turn.first; i < turn.first + turn.count; ++i) queue.end_tile(i, true, false);
  queue.tell(QueueEvent::kTurnDone);
}

using Texts = std::vector<std::string>;

TEST(UpdateQueue, ReadsAsManyTilesAheadAsThereAreBuffers) {
  UpdateQueue queue(three_blocks());
  queue.tell(QueueEvent::kFetched);
  EXPECT_EQ(moves(queue), (Texts{"load 0 in 0", "load 1 in 1", "load 2 in 2"}));
  queue.tell(QueueEvent::kBegin);
  EXPECT_EQ(moves(queue, Moves::kGradients), (Texts{"gradient 0 in 0", "gradient 1 in 1", "gradient 2 in 2"}));
  const auto turn = queue.next_turn(Turns::kUntil, 0);
  ASSERT_TRUE(turn);
  EXPECT_EQ(*turn, (TileTurn{.first = 0, .count = 1, .block = 0}));
  EXPECT_EQ(queue.end_tile(0, true, false), TileEnd::kSave);
  queue.tell(QueueEvent::kTurnDone);
  EXPECT_EQ(moves(queue), Texts{}) << "the next buffer is being written";
  EXPECT_EQ(queue.saving(), 0u);
  queue.tell(QueueEvent::kWritten, 0);
  EXPECT_EQ(moves(queue), (Texts{"load 3 in 0", "gradient 3 in 0"}));
}

TEST(UpdateQueue, WaitsForABufferOnlyWhenItsTilesTurnHasCome) {
  UpdateQueueOptions options = three_blocks();
  options.reads_ahead = false;
  UpdateQueue queue(options);
  queue.tell(QueueEvent::kFetched);
  EXPECT_EQ(moves(queue), Texts{});
  queue.tell(QueueEvent::kBegin);
  EXPECT_EQ(moves(queue), Texts{});
  for (std::uint32_t t = 0; t < 5; ++t) {
    const auto turn = queue.next_turn(Turns::kUntil, 1);
    ASSERT_TRUE(turn);
    const std::string tile = std::to_string(t) + " in " + std::to_string(t % 3);
    EXPECT_EQ(moves(queue), (Texts{"load " + tile, "gradient " + tile}));
    update(queue, *turn);
  }
  EXPECT_FALSE(queue.next_turn(Turns::kUntil, 1));
  EXPECT_TRUE(queue.under_way());
}

TEST(UpdateQueue, ReadsAheadPastWhatIsUpdatedInPlace) {
  UpdateQueueOptions options = three_blocks();
  options.in_place = {0, 1, 1, 0, 0, 1, 0};
  ASSERT_EQ(options.numbers(), 6u);
  UpdateQueue queue(options);
  queue.tell(QueueEvent::kFetched);
  EXPECT_EQ(moves(queue), (Texts{"load 0 in 0", "load 3 in 1", "load 4 in 2"}));
  queue.tell(QueueEvent::kBegin);
  EXPECT_EQ(moves(queue, Moves::kGradients), (Texts{"gradient 0 in 0", "gradient 3 in 1", "gradient 4 in 2"}));
  update(queue, *queue.next_turn(Turns::kRest));
  EXPECT_EQ(moves(queue), Texts{}) << "the next buffer is being written";
  for (const char* load : {"load 1 in 3", "load 2 in 4"}) {
    const auto turn = queue.next_turn(Turns::kRest);
    EXPECT_EQ(moves(queue), Texts{load}) << "when its turn has come, and without a gradient";
    EXPECT_EQ(queue.saving(), 0u);
    update(queue, *turn);
  }
  queue.tell(QueueEvent::kWritten, 0);
  EXPECT_EQ(moves(queue), (Texts{"load 6 in 0", "gradient 6 in 0"}));
  for (const std::uint32_t tile : {3u, 4u}) {
    const auto turn = queue.next_turn(Turns::kRest);
    EXPECT_EQ(queue.tile(turn->first), tile);
    update(queue, *turn);
  }
  const auto in_place = queue.next_turn(Turns::kRest);
  EXPECT_EQ(moves(queue), Texts{"load 5 in 5"});
  update(queue, *in_place);
  EXPECT_TRUE(queue.next_turn(Turns::kRest)->ends_block);
}

TEST(UpdateQueue, SaysWhichWeightsAreReadable) {
  UpdateQueue queue(three_blocks());
  for (std::uint32_t b = 0; b < 3; ++b) EXPECT_EQ(queue.weights_from(b), WeightsFrom::kNewest);
  queue.tell(QueueEvent::kComplete, 2);
  EXPECT_EQ(queue.weights_from(2), WeightsFrom::kCommitted) << "its update may be taken back";
  EXPECT_EQ(queue.weights_from(1), WeightsFrom::kNewest);
  while (const auto turn = queue.next_turn(Turns::kEarlyAll)) update(queue, *turn);
  queue.tell(QueueEvent::kBegin);
  EXPECT_EQ(queue.weights_from(2), WeightsFrom::kNewest);
  EXPECT_EQ(queue.weights_from(0), WeightsFrom::kUpdate);
  EXPECT_TRUE(queue.delivers(0));
  while (const auto turn = queue.next_turn(Turns::kUntil, 0)) update(queue, *turn);
  EXPECT_EQ(queue.weights_from(0), WeightsFrom::kNewest);
  EXPECT_EQ(queue.weights_from(1), WeightsFrom::kUpdate);
  EXPECT_FALSE(queue.delivers(0)) << "it has had its turn";
}

TEST(UpdateQueue, BringsWeightsOfNoBlockWithAFrozenTileOrOnSeveralNodes) {
  UpdateQueueOptions frozen = three_blocks();
  frozen.trainable[3] = 0;
  std::erase(frozen.order, 3u);
  UpdateQueue one(frozen);
  one.tell(QueueEvent::kBegin);
  EXPECT_TRUE(one.delivers(0));
  EXPECT_FALSE(one.delivers(1));
  UpdateQueueOptions nodes = three_blocks();
  nodes.buffers = 4;
  nodes.nodes = 2;
  UpdateQueue two(nodes);
  two.tell(QueueEvent::kBegin);
  EXPECT_FALSE(two.delivers(0));
  EXPECT_EQ(two.next_turn(Turns::kUntil, 0)->count, 2u);
}

TEST(UpdateQueue, ReadsWhatItExpectsAndDropsItWhenAnotherCompletes) {
  UpdateQueue queue(three_blocks());
  const std::uint32_t expected[] = {2, 1};
  EXPECT_TRUE(queue.expect(expected));
  EXPECT_FALSE(queue.expect(expected)) << "once in a step";
  EXPECT_EQ(moves(queue), (Texts{"load 5 in 0", "load 6 in 1", "load 2 in 2"}));
  EXPECT_FALSE(queue.next_turn(Turns::kEarlyAll));
  queue.tell(QueueEvent::kComplete, 2);
  queue.tell(QueueEvent::kComplete, 0);
  EXPECT_EQ(moves(queue), (Texts{"drop in 2", "load 0 in 2"}));
  EXPECT_FALSE(queue.next_turn(Turns::kEarly)) << "neither read nor landed";
  queue.tell(QueueEvent::kLanded, 2);
  EXPECT_FALSE(queue.next_turn(Turns::kEarly));
  queue.tell(QueueEvent::kRead, *queue.reading());
  EXPECT_EQ(queue.tile(queue.next_turn(Turns::kEarly)->first), 5u);
}

TEST(UpdateQueue, UpdatesNothingBehindAGradientOrAResultThatIsNotFinite) {
  UpdateQueue gradient(three_blocks());
  gradient.tell(QueueEvent::kComplete, 2);
  gradient.tell(QueueEvent::kComplete, 1);
  EXPECT_EQ(moves(gradient).size(), 3u);
  gradient.tell(QueueEvent::kNotFinite, 2);
  const auto passed = gradient.next_turn(Turns::kEarlyOf, 2);
  ASSERT_TRUE(passed);
  EXPECT_EQ(passed->kind, TileTurn::Kind::kPassOver);
  EXPECT_EQ(moves(gradient), (Texts{"drop in 2", "drop in 1", "drop in 0"}));
  gradient.tell(QueueEvent::kTurnDone);
  EXPECT_TRUE(gradient.next_turn(Turns::kEarlyOf, 2)->ends_block);
  EXPECT_FALSE(gradient.next_turn(Turns::kEarlyAll));

  UpdateQueue result(three_blocks());
  result.tell(QueueEvent::kComplete, 2);
  EXPECT_EQ(moves(result).size(), 2u);
  const auto turn = result.next_turn(Turns::kEarlyAll);
  EXPECT_EQ(result.end_tile(turn->first, false, false), TileEnd::kDrop);
  result.tell(QueueEvent::kTurnDone);
  EXPECT_EQ(moves(result), (Texts{"drop in 1"}));
  EXPECT_EQ(result.overflow(), 5u);

  UpdateQueue late(three_blocks());
  late.tell(QueueEvent::kBegin);
  EXPECT_EQ(late.end_tile(late.next_turn(Turns::kRest)->first, false, false), TileEnd::kRefuse);
}

TEST(UpdateQueue, ChecksAndHandsOnWhatNobodyHasRead) {
  UpdateQueueOptions options = three_blocks();
  options.checked = {2, 3, 4};
  UpdateQueue queue(options);
  queue.tell(QueueEvent::kBeginCheck);
  EXPECT_EQ(moves(queue), (Texts{"load 2 in 0", "load 3 in 1", "load 4 in 2"})) << "no gradients";
  EXPECT_TRUE(queue.delivers(1));
  const auto turn = queue.next_turn(Turns::kUntil, 1);
  EXPECT_EQ(turn->kind, TileTurn::Kind::kCheck);
  EXPECT_EQ(queue.end_tile(0, true, true), TileEnd::kRestored);
  EXPECT_EQ(queue.end_tile(1, true, false), TileEnd::kDrop);
}

TEST(UpdateQueue, VisitsEveryTileInOrderAndThenGoesOn) {
  UpdateQueue queue(three_blocks());
  queue.tell(QueueEvent::kComplete, 1);
  while (const auto turn = queue.next_turn(Turns::kEarlyAll)) update(queue, *turn);
  queue.tell(QueueEvent::kBegin);
  queue.tell(QueueEvent::kTour);
  Texts seen;
  for (int i = 0; i < 4; ++i) {
    const auto turn = queue.next_turn(Turns::kRest);
    seen.push_back((turn->kind == TileTurn::Kind::kVisit ? "visit " : "update ") +
                   std::to_string(queue.tile(turn->first)));
    update(queue, *turn);
  }
  EXPECT_EQ(seen, (Texts{"update 0", "update 1", "visit 2", "visit 3"}));
  queue.tell(QueueEvent::kEndTour);
  EXPECT_EQ(queue.tile(queue.next_turn(Turns::kRest)->first), 5u) << "4 has no update";
}

// Steps of any kind, and what must hold in each of them. The drive and the device are dice.
class RandomSteps {
 public:
  explicit RandomSteps(std::uint64_t seed) : dice_(seed) {
    const std::uint32_t blocks = 1 + below(5);
    options_.buffers = 1 + below(5);
    if (below(4) == 0) options_.nodes = 2, options_.buffers *= 2;
    options_.reads_ahead = below(4) > 0;
    options_.writes_behind = below(4) > 0;
    options_.early_planned = below(3) == 0;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      const auto first = static_cast<std::uint32_t>(options_.trainable.size());
      options_.blocks.push_back({first, 1 + below(4)});
      for (std::uint32_t t = first; t < first + options_.blocks[b].tiles; ++t) {
        options_.trainable.push_back(below(6) > 0);
        block_.push_back(b);
        if (options_.trainable[t]) options_.order.push_back(t);
        if (options_.trainable[t] && below(3) > 0) options_.checked.push_back(t);
      }
    }
    if (options_.nodes > 1) std::ranges::shuffle(options_.order, dice_);
    if (options_.nodes == 1 && below(2) == 0) {
      for (std::size_t t = 0; t < options_.trainable.size(); ++t) options_.in_place.push_back(below(3) == 0);
    }
    queue_.emplace(options_);
    held_.resize(options_.numbers());
  }

  void run() {
    for (int step = 0; step < 6; ++step) run_step(below(8) == 0);
  }

 private:
  enum class State { kFree, kLoading, kSaving };
  struct Held {
    State state = State::kFree;
    std::uint32_t tile = 0;
    bool gradient = false;
  };

  std::uint32_t below(std::uint32_t end) { return std::uniform_int_distribution<std::uint32_t>(0, end - 1)(dice_); }

  bool in_place(std::uint32_t tile) const { return !options_.in_place.empty() && options_.in_place[tile] != 0; }

  void make(const TileMove& move) {
    Held& held = held_[move.buffer];
    switch (move.kind) {
      case TileMove::Kind::kLoad:
        ASSERT_EQ(move.buffer >= options_.buffers, in_place(move.tile));
        ASSERT_TRUE(due_ || !in_place(move.tile));
        ASSERT_NE(held.state, State::kLoading) << "a buffer holds one tile";
        ASSERT_TRUE(held.state == State::kFree || due_) << "what is read ahead waits for no save";
        held = {State::kLoading, move.tile};
        return;
      case TileMove::Kind::kGradient:
        ASSERT_TRUE(begun_ && held.state == State::kLoading && held.tile == move.tile && !held.gradient);
        held.gradient = true;
        return;
      case TileMove::Kind::kDrop: ASSERT_EQ(held.state, State::kLoading); held = {};
    }
  }

  void make_moves(Moves allowed = Moves::kAll) {
    for (;;) {
      while (const auto move = queue_->next_move(allowed)) make(*move);
      const auto saving = queue_->saving();
      if (allowed != Moves::kAll || !saving || below(2) == 0) return;
      held_[*saving].state = State::kFree;
      queue_->tell(QueueEvent::kWritten, *saving);
    }
  }

  void take(const TileTurn& turn) {
    due_ = true;
    make_moves(turn.kind == TileTurn::Kind::kPassOver ? Moves::kDrops : Moves::kAll);
    for (std::size_t i = turn.first; i < turn.first + turn.count; ++i) {
      if (turn.kind == TileTurn::Kind::kPassOver) continue;
      Held& held = held_[queue_->buffer(i)];
      ASSERT_EQ(held.state, State::kLoading) << "a tile is there when its turn comes";
      ASSERT_EQ(held.tile, queue_->tile(i));
      const bool updates = turn.kind == TileTurn::Kind::kUpdate;
      ASSERT_EQ(held.gradient, begun_ && updates && !in_place(held.tile)) << "inside backward it is never on NVMe";
      if (updates) {
        ASSERT_TRUE(updated_.insert(held.tile).second) << "once in a step";
      }
      if (touring_) {
        ASSERT_EQ(held.tile, shown_++);
      }
      const TileEnd end = queue_->end_tile(i, true, below(2) == 0);
      ASSERT_EQ(end == TileEnd::kSave || end == TileEnd::kSaveNow, updates);
      held = {end == TileEnd::kSave || end == TileEnd::kRestored ? State::kSaving : State::kFree, held.tile};
    }
    queue_->tell(QueueEvent::kTurnDone);
    due_ = false;
    make_moves(Moves::kDrops);
  }

  void check_versions() {
    for (std::uint32_t b = 0; b < options_.blocks.size(); ++b) {
      bool all = true, any = false;
      for (const std::uint32_t t : options_.order) {
        if (block_[t] != b) continue;
        all = all && updated_.contains(t);
        any = any || updated_.contains(t);
      }
      const WeightsFrom from = queue_->weights_from(b);
      if (begun_ && !checked_) {
        ASSERT_EQ(from == WeightsFrom::kUpdate, !all);
      }
      if (!begun_ && any) {
        ASSERT_EQ(from, WeightsFrom::kCommitted);
      }
    }
  }

  void run_backward(std::vector<std::uint32_t> blocks) {
    if (below(2) == 0) queue_->expect(blocks);
    if (below(4) == 0) std::ranges::shuffle(blocks, dice_);
    make_moves();
    std::set<std::uint32_t> complete;
    for (const std::uint32_t block : blocks) {
      queue_->tell(QueueEvent::kComplete, block);
      complete.insert(block);
      make_moves();
      while (const auto first = queue_->early_block()) {
        ASSERT_TRUE(complete.contains(*first));
        if (below(3) == 0) break;
        queue_->tell(not_finite_ == *first ? QueueEvent::kNotFinite : QueueEvent::kLanded, *first);
        make_moves();
        if (const auto reading = queue_->reading()) queue_->tell(QueueEvent::kRead, *reading);
        const auto turn = below(3) == 0 ? queue_->next_turn(Turns::kEarlyOf, *first) : queue_->next_turn(Turns::kEarly);
        if (!turn) break;
        take(*turn);
        check_versions();
      }
    }
  }

  void run_step(bool checks) {
    updated_.clear();
    begun_ = checked_ = touring_ = false;
    shown_ = 0;
    not_finite_ = below(4) == 0 ? below(5) : 99;
    if (checks) {
      queue_->tell(QueueEvent::kBeginCheck);
      begun_ = checked_ = true;
    } else {
      std::vector<std::uint32_t> blocks;
      for (std::uint32_t b = 0; b < options_.blocks.size(); ++b) {
        if (options_.early_planned || below(3) == 0) blocks.push_back(b);
      }
      std::ranges::reverse(blocks);
      if (below(2) == 0) run_backward(blocks);
      if (below(2) == 0) queue_->tell(QueueEvent::kFetched), make_moves();
      if (queue_->early_under_way() && (below(3) == 0 || not_finite_ < 99)) return take_back();
      while (const auto turn = queue_->next_turn(Turns::kEarlyAll)) take(*turn);
      if (below(8) == 0) queue_->tell(QueueEvent::kCancel), make_moves(Moves::kDrops);
      queue_->tell(QueueEvent::kBegin);
      begun_ = true;
      make_moves(Moves::kGradients);
    }
    const std::set<std::uint32_t> before = updated_;
    for (std::uint32_t b = 0; b < options_.blocks.size(); ++b) {
      if (!touring_ && shown_ == 0 && below(6) == 0) {
        queue_->tell(QueueEvent::kTour);
        make_moves(Moves::kDrops);
        touring_ = true;
      }
      if (touring_ && below(8) == 0) {
        queue_->tell(QueueEvent::kEndTour);
        make_moves(Moves::kDrops);
        touring_ = false, shown_ = 1;
      }
      while (const auto turn = queue_->next_turn(Turns::kUntil, b)) take(*turn);
      check_versions();
    }
    while (const auto turn = queue_->next_turn(Turns::kRest)) take(*turn);
    if (!checks) {
      ASSERT_EQ(updated_, std::set<std::uint32_t>(options_.order.begin(), options_.order.end()));
    }
    if (touring_) {
      ASSERT_EQ(shown_, options_.trainable.size());
    }
    end();
  }

  void take_back() {
    queue_->tell(QueueEvent::kCancel);
    make_moves(Moves::kDrops);
    ASSERT_TRUE(queue_->touched() || updated_.empty());
    end();
  }

  void end() {
    queue_->tell(QueueEvent::kEnd);
    for (Held& held : held_) {
      ASSERT_NE(held.state, State::kLoading) << "nothing is left on its way";
      held = {};
    }
  }

  std::mt19937_64 dice_;
  UpdateQueueOptions options_;
  std::vector<std::uint32_t> block_;  // by tile
  std::optional<UpdateQueue> queue_;
  std::vector<Held> held_;
  std::set<std::uint32_t> updated_;  // in this step
  std::uint32_t shown_ = 0, not_finite_ = 99;
  bool begun_ = false, checked_ = false, touring_ = false, due_ = false;
};

TEST(UpdateQueue, KeepsItsPromisesInAnySequence) {
  const std::uint64_t first = test_seed();
  for (std::uint64_t i = 0; i < 3000 && !::testing::Test::HasFatalFailure(); ++i) {
    SCOPED_TRACE("case " + std::to_string(first + i));
    RandomSteps(first + i).run();
  }
}

}  // namespace
}  // namespace spillway
