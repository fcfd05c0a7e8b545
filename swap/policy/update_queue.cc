#include "swap/policy/update_queue.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "spillway/error.h"

namespace spillway {

UpdateQueue::UpdateQueue(UpdateQueueOptions options)
    : options_(std::move(options)),
      block_of_(options_.trainable.size()),
      first_of_(options_.blocks.size()),
      end_of_(options_.blocks.size()),
      landed_(options_.blocks.size()),
      not_finite_(options_.blocks.size()),
      read_(options_.numbers()),
      saving_(options_.numbers()) {
  SPILLWAY_CHECK(options_.buffers > 0 && options_.nodes > 0, "a tile is updated in a buffer, on a node");
  SPILLWAY_CHECK(options_.in_place.empty() || options_.nodes == 1, "buffers of several nodes are taken in turn");
  for (std::uint32_t b = 0; b < options_.blocks.size(); ++b) {
    const UpdateQueueOptions::Block& block = options_.blocks[b];
    std::fill_n(block_of_.begin() + block.first_tile, block.tiles, b);
  }
  queue_.reserve(options_.order.size());
  passing_.reserve(options_.order.size());
  drops_.reserve(2 * std::size_t{options_.buffers});
}

void UpdateQueue::reset() {
  queue_.clear();
  passing_.clear();
  std::ranges::fill(end_of_, 0u);
  std::ranges::fill(landed_, 0);
  std::ranges::fill(not_finite_, 0);
  early_end_ = next_ = due_ = loading_ = gradients_ = 0;
  begun_ = checking_ = touring_ = stopped_ = expected_ = placed_ = false;
  early_overflow_.reset();
  updated_.clear();
}

void UpdateQueue::append(std::uint32_t tile) {
  const std::uint32_t block = block_of_[tile];
  if (end_of_[block] == 0) first_of_[block] = queue_.size();
  queue_.push_back(tile);
  end_of_[block] = queue_.size();
  count_passing(queue_.size() - 1);
}

bool UpdateQueue::in_place(std::size_t position) const {
  return !options_.in_place.empty() && options_.in_place[queue_[position]] != 0;
}

// Of the queue from there on.
void UpdateQueue::count_passing(std::size_t begin) {
  passing_.resize(queue_.size());
  for (std::size_t i = begin; i < queue_.size(); ++i) {
    passing_[i] = i == 0 ? 0 : passing_[i - 1] + (in_place(i - 1) ? 0u : 1u);
  }
}

std::uint32_t UpdateQueue::buffer(std::size_t position) const {
  const std::uint32_t passing = passing_[position];
  if (in_place(position)) return options_.buffers + (static_cast<std::uint32_t>(position) - passing) % options_.buffers;
  return passing % options_.buffers;
}

void UpdateQueue::append_block(std::uint32_t b) {
  const UpdateQueueOptions::Block& block = options_.blocks[b];
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    if (options_.trainable[t]) append(t);
  }
}

// What is not in the queue yet, in order.
void UpdateQueue::fill() {
  forget_expected();
  if (queue_.size() == options_.order.size()) return;
  for (const std::uint32_t tile : options_.order) {
    const std::uint32_t block = block_of_[tile];
    if (end_of_[block] == 0 || first_of_[block] >= early_end_) append(tile);
  }
}

bool UpdateQueue::expect(std::span<const std::uint32_t> blocks) {
  if (!queue_.empty() || !options_.reads_ahead) return false;
  for (const std::uint32_t block : blocks) append_block(block);
  return expected_ = !queue_.empty();
}

void UpdateQueue::forget_expected() {
  if (!expected_) return;
  expected_ = false;
  cancel(early_end_);
  for (; queue_.size() > early_end_; queue_.pop_back()) end_of_[block_of_[queue_.back()]] = 0;
  passing_.resize(queue_.size());
}

void UpdateQueue::complete(std::uint32_t block) {
  const auto tiles = std::span(options_.trainable).subspan(options_.blocks[block].first_tile);
  if (std::ranges::count(tiles.first(options_.blocks[block].tiles), 1) == 0) return;
  const bool comes_next = early_end_ < queue_.size() && block_of_[queue_[early_end_]] == block;
  // The blocks complete in another order than was expected: what was read for them is dropped.
  if (!comes_next) forget_expected();
  if (early_end_ < queue_.size() && !expected_) return;  // what is read ahead already keeps its turn
  if (!comes_next) append_block(block);
  early_end_ = end_of_[block];
}

// Loads of the queue from there on.
void UpdateQueue::cancel(std::size_t begin) {
  for (; loading_ > begin; --loading_) {
    if (!in_place(loading_ - 1)) drops_.push_back(buffer(loading_ - 1));
  }
  gradients_ = std::min(gradients_, loading_);
}

void UpdateQueue::stop() {
  stopped_ = true;
  cancel(next_);
}

void UpdateQueue::tell(QueueEvent event, std::uint32_t subject) {
  switch (event) {
    case QueueEvent::kComplete: return complete(subject);
    case QueueEvent::kLanded: landed_[subject] = 1; return;
    case QueueEvent::kNotFinite: landed_[subject] = not_finite_[subject] = 1; return;
    case QueueEvent::kRead: read_[subject] = 1; return;
    case QueueEvent::kWritten: saving_[subject] = 0; return;
    case QueueEvent::kFetched:
      if (options_.reads_ahead && !options_.early_planned && early_end_ == 0) fill();
      return;
    case QueueEvent::kTurnDone: return end_turn();
    case QueueEvent::kBegin:
      fill();
      begun_ = true;
      // Tiles that were read ahead came without their gradients, which were not all there: now they are asked for.
      gradients_ = next_;
      return;
    case QueueEvent::kBeginCheck: return begin_check();
    case QueueEvent::kTour: return begin_tour();
    case QueueEvent::kEndTour: return end_tour();
    case QueueEvent::kCancel: return cancel(next_);
    case QueueEvent::kEnd: return reset();
  }
}

void UpdateQueue::begin_check() {
  for (const std::uint32_t tile : options_.checked) append(tile);
  begun_ = checking_ = true;
}

void UpdateQueue::begin_tour() {
  // What has been started to load comes first in the new queue, too, as a rule.
  bool keeps = next_ == 0;
  for (std::size_t i = 0; i < loading_; ++i) keeps = keeps && queue_[i] == i;
  if (!keeps) {
    cancel(next_);
    loading_ = 0;
  }
  updated_.assign(options_.trainable.size(), 0);
  for (std::size_t i = next_; begun_ && i < queue_.size(); ++i) updated_[queue_[i]] = 1;
  queue_.resize(options_.trainable.size());
  std::iota(queue_.begin(), queue_.end(), 0u);
  count_passing(0);
  next_ = due_ = 0;
  gradients_ = loading_;
  stopped_ = false;
  touring_ = true;
  place_blocks();
}

// What of the queue comes after this turn is what is left to be updated.
void UpdateQueue::end_tour() {
  touring_ = false;
  cancel(next_ + due_);
  const auto rest = queue_.begin() + static_cast<std::ptrdiff_t>(next_ + due_);
  queue_.erase(std::remove_if(rest, queue_.end(), [this](std::uint32_t tile) { return !is_updated(tile); }),
               queue_.end());
  count_passing(next_ + due_);
  updated_.clear();
  place_blocks();
}

// Where each block's updated tiles stand in the queue.
void UpdateQueue::place_blocks() {
  std::ranges::fill(end_of_, 0u);
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    if (!is_updated(queue_[i])) continue;
    const std::uint32_t block = block_of_[queue_[i]];
    if (end_of_[block] == 0) first_of_[block] = i;
    end_of_[block] = i + 1;
  }
}

// Of a tile that was read before the gradients were all there, or the one that was started last.
std::optional<TileMove> UpdateQueue::next_gradient() {
  while (begun_ && !checking_ && gradients_ < loading_) {
    const std::size_t position = gradients_++;
    if (!is_updated(queue_[position]) || in_place(position)) continue;
    return TileMove{TileMove::Kind::kGradient, queue_[position], buffer(position)};
  }
  return std::nullopt;
}

// A load starts when its buffer's last save is done; only tiles whose turn it is wait.
std::optional<TileMove> UpdateQueue::next_move(Moves allowed) {
  if (!drops_.empty()) {
    const std::uint32_t dropped = drops_.front();
    drops_.erase(drops_.begin());
    return TileMove{.kind = TileMove::Kind::kDrop, .buffer = dropped};
  }
  if (allowed == Moves::kDrops) return std::nullopt;
  if (const auto gradient = next_gradient()) return gradient;
  if (allowed == Moves::kGradients || stopped_) return std::nullopt;
  if (due_ > 0 && in_place(next_) && !placed_) {
    placed_ = true;
    saving_[buffer(next_)] = 0;
    return TileMove{TileMove::Kind::kLoad, queue_[next_], buffer(next_)};
  }
  while (loading_ < queue_.size() && in_place(loading_)) ++loading_;
  if (loading_ >= queue_.size() || saving()) return std::nullopt;
  // Ahead of its turn a tile may be read only into a buffer whose tile has had its turn: as many are ahead as there are
  // buffers.
  if (loading_ >= next_ + due_) {  // ahead of its turn
    if (!options_.reads_ahead || passing_[loading_] >= passing_[next_] + options_.buffers) return std::nullopt;
  }
  const std::uint32_t b = buffer(loading_);
  read_[b] = saving_[b] = 0;
  return TileMove{TileMove::Kind::kLoad, queue_[loading_++], b};
}

std::optional<std::uint32_t> UpdateQueue::saving() const {
  if (loading_ < next_ + due_ || loading_ >= queue_.size() || in_place(loading_)) return std::nullopt;
  const std::uint32_t b = buffer(loading_);
  return saving_[b] ? std::optional(b) : std::nullopt;
}

std::optional<std::uint32_t> UpdateQueue::reading() const {
  if (next_ >= loading_ || in_place(next_)) return std::nullopt;
  return buffer(next_);
}

std::optional<std::uint32_t> UpdateQueue::early_block() const {
  if (begun_ || next_ >= early_end_) return std::nullopt;
  return block_of_[queue_[next_]];
}

// What is not read ahead never would be.
bool UpdateQueue::arrived() const {
  if (!landed_[block_of_[queue_[next_]]]) return false;
  return !options_.reads_ahead || in_place(next_) || (next_ < loading_ && read_[buffer(next_)]);
}

std::optional<TileTurn> UpdateQueue::next_turn(Turns which, std::uint32_t block) {
  const bool early = which >= Turns::kEarly;
  bool comes = false;
  switch (which) {
    case Turns::kUntil: comes = next_ < end_of_[block]; break;
    case Turns::kRest: comes = under_way(); break;
    case Turns::kShown: {
      const std::size_t end = options_.blocks[block].first_tile + options_.blocks[block].tiles;
      comes = touring_ && next_ < end && !is_updated(queue_[next_]);
      break;
    }
    case Turns::kEarly: comes = !stopped_ && next_ < early_end_ && arrived(); break;
    case Turns::kEarlyAll: comes = !stopped_ && next_ < early_end_; break;
    case Turns::kEarlyOf: comes = next_ < end_of_[block]; break;
  }
  if (!comes) return std::nullopt;
  TileTurn turn{.first = next_, .block = block_of_[queue_[next_]]};
  // The step will be refused or skipped: nothing more may be overwritten for it.
  if (early && not_finite_[turn.block]) stop();
  if (begun_ && !touring_) turn.count = std::min<std::size_t>(options_.nodes, queue_.size() - next_);
  if (touring_ && !is_updated(queue_[next_])) {
    turn.kind = TileTurn::Kind::kVisit;
  } else if (checking_) {
    turn.kind = TileTurn::Kind::kCheck;
  } else if (stopped_) {
    turn.kind = TileTurn::Kind::kPassOver;
  }
  turn.ends_block = next_ + turn.count == end_of_[turn.block];
  due_ = turn.count;
  return turn;
}

TileEnd UpdateQueue::end_tile(std::size_t position, bool finite, bool delivered) {
  const std::uint32_t tile = queue_[position];
  if (!is_updated(tile)) return TileEnd::kDrop;
  // A check reads in order to verify; the bytes are used only where a forward pass asks for them.
  if (checking_ && !delivered) return TileEnd::kDrop;
  if (!finite && begun_) return TileEnd::kRefuse;
  if (!finite) {  // the step may come to nothing for another reason
    early_overflow_ = tile;
    return TileEnd::kDrop;
  }
  saving_[buffer(position)] = 1;
  if (checking_) return TileEnd::kRestored;
  if (options_.writes_behind) return TileEnd::kSave;
  saving_[buffer(position)] = 0;
  return TileEnd::kSaveNow;
}

void UpdateQueue::end_turn() {
  next_ += std::exchange(due_, 0);
  placed_ = false;
  if (early_overflow_) stop();
}

WeightsFrom UpdateQueue::weights_from(std::uint32_t block) const {
  const std::size_t end = end_of_[block];
  if (begun_) return next_ < end ? WeightsFrom::kUpdate : WeightsFrom::kNewest;
  // Before the update has begun, what early updates have written is not to be seen: they may be taken back.
  return end > 0 && end <= early_end_ ? WeightsFrom::kCommitted : WeightsFrom::kNewest;
}

// All of the block, and nothing else: frozen tiles are fetched, and with several nodes tiles of two blocks may be
// updated at the same time.
bool UpdateQueue::delivers(std::uint32_t block) const {
  const std::size_t first = first_of_[block], end = end_of_[block];
  return options_.nodes == 1 && next_ <= first && end == first + options_.blocks[block].tiles &&
         std::all_of(queue_.begin() + static_cast<std::ptrdiff_t>(first),
                     queue_.begin() + static_cast<std::ptrdiff_t>(end),
                     [this](std::uint32_t tile) { return is_updated(tile); });
}

}  // namespace spillway
