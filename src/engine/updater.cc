#include "src/engine/updater.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "spillway/error.h"
#include "src/checkpoint/tile_values.h"
#include "src/plan/node_tiles.h"

namespace spillway {
Updater::Updater(const Plan& plan, const ModelDescription& model, Device& device, HostWorkers& workers,
                 TileMover& mover, GradientCollector& gradients, Stream& stream, Watch watch)
    : plan_(plan),
      model_(model),
      device_(device),
      workers_(workers),
      mover_(mover),
      gradients_(gradients),
      stream_(stream),
      watch_(watch),
      nodes_(updating_nodes(plan, workers.nodes())),
      order_(update_order(plan, nodes_)),
      first_of_(plan.blocks.size()),
      end_of_(plan.blocks.size()),
      updates_(nodes_),
      ranges_(nodes_),
      memories_(nodes_),
      finite_(nodes_) {
  queue_.reserve(order_.size());
  std::size_t most = 0;
  for (const Block& block : model.blocks) most = std::max(most, block.parameters.size());
  for (std::vector<GroupRange>& ranges : ranges_) ranges.reserve(most);
}

void Updater::reset() {
  queue_.clear();
  std::ranges::fill(end_of_, 0u);
  early_end_ = next_ = loading_ = 0;
  begun_ = checking_ = stopped_ = expected_ = false;
  early_overflow_.reset();
  look_ = nullptr;
  updated_.clear();
}

void Updater::append(std::uint32_t tile) {
  const std::uint32_t block = plan_.tiles[tile].block;
  if (end_of_[block] == 0) first_of_[block] = queue_.size();
  queue_.push_back(tile);
  end_of_[block] = queue_.size();
}

void Updater::append_block(std::uint32_t block) {
  const BlockPlan& plan = plan_.blocks[block];
  for (std::uint32_t t = plan.first_tile; t < plan.first_tile + plan.tiles; ++t) {
    if (plan_.tiles[t].range.trainable) append(t);
  }
}

// What is not in the queue yet, in order.
void Updater::fill_queue() {
  forget_expected();
  if (queue_.size() == order_.size()) return;
  for (std::uint32_t tile : order_) {
    const std::uint32_t block = plan_.tiles[tile].block;
    if (end_of_[block] == 0 || first_of_[block] >= early_end_) append(tile);
  }
}

// Tile i of the queue uses buffer i mod buffers. A load starts when its buffer's last save is done; only the `count`
// tiles that are due wait.
void Updater::start_loads(std::size_t due, std::size_t count) {
  if (stopped_) return;
  const std::uint32_t buffers = mover_.buffers();
  const std::size_t end = std::min(queue_.size(), due + (plan_.host.reads_ahead ? buffers : count));
  while (loading_ < end) {
    const auto buffer = static_cast<std::uint32_t>(loading_ % buffers);
    if (loading_ >= due + count && !mover_.idle(buffer)) return;
    mover_.start_load(queue_[loading_], buffer);
    if (begun_) load_gradient(loading_);
    ++loading_;
  }
}

// The drive has more to do as soon as a buffer is free again.
void Updater::wait_read(std::uint32_t buffer) {
  const StallMeter::Wait wait(watch_.stalls, StallCause::kRead);
  for (;;) {
    const std::uint64_t completed = mover_.completed();
    start_loads(next_, 0);
    if (mover_.read(buffer)) return;
    mover_.wait_completed_beyond(completed);
  }
}

// A spilled gradient is read once all of the step have been written.
void Updater::load_gradient(std::size_t position) {
  if (checking_ || !is_updated(queue_[position])) return;
  const auto spilled = gradients_.spilled(queue_[position]);
  const auto buffer = static_cast<std::uint32_t>(position % mover_.buffers());
  if (spilled) mover_.load_gradient(buffer, spilled->extent, spilled->checksum);
}

void Updater::read_ahead() {
  if (plan_.gradients_in_hbm || !plan_.host.reads_ahead) return;
  if (!plan_.early_blocks && early_end_ == 0) fill_queue();
  start_loads(next_, 0);
}

void Updater::cancel_read_ahead() { cancel_loads(next_); }

// Of the queue from there on. What is not used need not be verified.
void Updater::cancel_loads(std::size_t begin) {
  for (; loading_ > begin; --loading_) {
    const auto buffer = static_cast<std::uint32_t>((loading_ - 1) % mover_.buffers());
    mover_.arrive(buffer);
    mover_.drop(buffer);
  }
}

void Updater::expect(std::span<const std::uint32_t> blocks) {
  if (!queue_.empty() || !plan_.host.reads_ahead) return;
  for (const std::uint32_t block : blocks) append_block(block);
  expected_ = !queue_.empty();
  start_loads(next_, 0);
}

void Updater::forget_expected() {
  if (!expected_) return;
  expected_ = false;
  cancel_loads(early_end_);
  for (; queue_.size() > early_end_; queue_.pop_back()) end_of_[plan_.tiles[queue_.back()].block] = 0;
}

void Updater::add(std::uint32_t block, const ParameterUpdates& parameters) {
  const bool comes_next = early_end_ < queue_.size() && plan_.tiles[queue_[early_end_]].block == block;
  if (!comes_next) forget_expected();
  if (early_end_ < queue_.size() && !expected_) return;  // what is read ahead already keeps its turn
  parameters_ = &parameters;
  if (!comes_next) append_block(block);
  early_end_ = end_of_[block];
  start_loads(next_, 0);
}

void Updater::advance(bool all) {
  while (!stopped_ && next_ < early_end_ && (all || arrived())) update_early();
}

// The next tile and its block's gradient are there. What is not read ahead never would be.
bool Updater::arrived() {
  if (!gradients_.landed(plan_.tiles[queue_[next_]].block)) return false;
  if (!plan_.host.reads_ahead) return true;
  start_loads(next_, 0);
  return loading_ > next_ && mover_.read(static_cast<std::uint32_t>(next_ % mover_.buffers()));
}

bool Updater::make_room() {
  if (next_ >= early_end_) return false;
  const std::uint32_t block = plan_.tiles[queue_[next_]].block;
  while (next_ < end_of_[block]) update_early();
  return true;
}

// The next tile of the queue, once its gradient is there; passed over when nothing is updated any more.
void Updater::update_early() {
  const std::uint32_t block = plan_.tiles[queue_[next_]].block;
  gradients_.wait_landed(block);
  if (!gradients_.finite(block)) stop();
  if (!stopped_) {
    start_loads(next_, 1);
    update(next_, 1, nullptr);
  }
  if (++next_ == end_of_[block]) gradients_.forget(block);
  early_overflow_ ? stop() : start_loads(next_, 0);
}

void Updater::stop() {
  stopped_ = true;
  cancel_read_ahead();
}

bool Updater::keep_early(bool right) {
  if (!early_under_way()) return true;
  if (right) advance(true);
  if (right && (!stopped_ || plan_.early_blocks)) return true;  // a result that is not finite is for begin() to refuse
  take_back();
  return false;
}

void Updater::take_back() {
  cancel_read_ahead();
  for (std::uint32_t b = 0; b < mover_.buffers(); ++b) mover_.finish_save(b);
  if (next_ > 0) mover_.forget_written();
  reset();
}

void Updater::begin(const ParameterUpdates& parameters) {
  if (plan_.gradients_in_hbm) return run_on_device(parameters);
  if (early_overflow_) refuse_overflow(tile_name(plan_, model_, *early_overflow_));
  fill_queue();
  parameters_ = &parameters;
  begun_ = true;
  for (std::size_t i = next_; i < loading_; ++i) load_gradient(i);
}

void Updater::begin_check() {
  for (const std::uint32_t tile : order_) {
    if (!resident(plan_.tile_places[tile])) append(tile);
  }
  begun_ = checking_ = true;
  start_loads(next_, 0);
}

bool Updater::run_until(std::uint32_t block, std::byte* to) {
  // All of the block, and nothing else: frozen tiles are fetched, and with several nodes tiles of two blocks may be
  // updated at the same time.
  const std::size_t first = first_of_[block], end = end_of_[block];
  const bool whole = nodes_ == 1 && next_ <= first && end == first + plan_.blocks[block].tiles &&
                     std::all_of(queue_.begin() + static_cast<std::ptrdiff_t>(first),
                                 queue_.begin() + static_cast<std::ptrdiff_t>(end),
                                 [this](std::uint32_t tile) { return is_updated(tile); });
  while (next_ < end_of_[block]) {
    std::byte* const place = whole && next_ >= first_of_[block] ? to : nullptr;
    if (look_) {
      look_next(place);
      continue;
    }
    const std::size_t together = std::min<std::size_t>(nodes_, queue_.size() - next_);
    start_loads(next_, together);
    update(next_, together, place);
    next_ += together;
  }
  if (under_way()) start_loads(next_, 0);
  return to != nullptr && whole;
}

void Updater::settle(std::uint32_t block) {
  const BlockPlan& plan = plan_.blocks[block];
  mover_.finish_saves_of(plan.first_tile, plan.first_tile + plan.tiles);
}

std::exception_ptr Updater::finish() {
  while (look_ && under_way()) look_next(nullptr);
  while (under_way()) run_until(plan_.tiles[queue_.back()].block, nullptr);
  for (std::uint32_t b = 0; b < mover_.buffers(); ++b) mover_.finish_save(b);
  reset();
  return std::exchange(look_failure_, nullptr);
}

void Updater::look(TileWork work) {
  // What has been started to load comes first in the new queue, too, as a rule.
  bool keeps = next_ == 0;
  for (std::size_t i = 0; i < loading_; ++i) keeps = keeps && queue_[i] == i;
  if (!keeps) {
    cancel_read_ahead();
    for (std::uint32_t b = 0; b < mover_.buffers(); ++b) mover_.finish_save(b);
    loading_ = 0;
  }
  updated_.assign(plan_.tiles.size(), 0);
  for (std::size_t i = next_; begun_ && i < queue_.size(); ++i) updated_[queue_[i]] = 1;
  queue_.resize(plan_.tiles.size());
  std::iota(queue_.begin(), queue_.end(), 0u);
  next_ = 0;
  stopped_ = false;
  look_ = std::move(work);
  place_blocks();
  start_loads(next_, 0);
}

// Where each block's updated tiles stand in the queue.
void Updater::place_blocks() {
  std::ranges::fill(end_of_, 0u);
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    if (!is_updated(queue_[i])) continue;
    const std::uint32_t block = plan_.tiles[queue_[i]].block;
    if (end_of_[block] == 0) first_of_[block] = i;
    end_of_[block] = i + 1;
  }
}

void Updater::show_until(std::uint32_t block) {
  const std::size_t end = plan_.blocks[block].first_tile + plan_.blocks[block].tiles;
  while (look_ && next_ < end && !is_updated(queue_[next_])) look_next(nullptr);
}

void Updater::look_next(std::byte* to) {
  start_loads(next_, 1);
  is_updated(queue_[next_]) ? update(next_, 1, to) : look_alone(next_);
  ++next_;
  if (look_failure_) end_look();
}

// The rest of the queue is what is left to be updated.
void Updater::end_look() {
  look_ = nullptr;
  cancel_read_ahead();
  const auto rest = queue_.begin() + static_cast<std::ptrdiff_t>(next_);
  queue_.erase(std::remove_if(rest, queue_.end(), [this](std::uint32_t tile) { return !is_updated(tile); }),
               queue_.end());
  updated_.clear();
  place_blocks();
}

void Updater::look_alone(std::size_t position) {
  const auto buffer = static_cast<std::uint32_t>(position % mover_.buffers());
  wait_read(buffer);
  show(queue_[position], mover_.finish_load(buffer));
  mover_.drop(buffer);
}

void Updater::show(std::uint32_t tile, const TileMemory& memory) {
  if (!look_) return;
  try {
    look_(tile, memory);
  } catch (...) {
    look_failure_ = std::current_exception();
  }
}

// Tiles [first, first + count) of the queue, one for each node. The bytes are verified in the pass that updates them: a
// mismatch is found behind the pass and before anything of the tile is saved.
void Updater::update(std::size_t first, std::size_t count, std::byte* to) {
  if (checking_) return check(first, count, to);
  const auto buffer_of = [this, first](std::size_t node) {
    return static_cast<std::uint32_t>((first + node) % mover_.buffers());
  };
  for (std::size_t node = 0; node < count; ++node) {
    const std::uint32_t t = queue_[first + node], buffer = buffer_of(node);
    const TilePlan& place = plan_.tiles[t];
    wait_read(buffer);
    const TileMemory& memory = memories_[node] = mover_.arrive(buffer);
    const ExtentHashes spilled = mover_.expected_gradient(buffer);
    const std::byte* gradient =
        spilled.bytes.empty() ? gradients_.gradient(place.block) + byte_offset(t) : spilled.bytes.data();
    updates_[node] = {.tile = tile_arrays(plan_.tile_places[t].shape, memory, gradient),
                      .groups = parameters_->ranges(t, ranges_[node]),
                      .scalars = parameters_->scalars(),
                      .weights = mover_.expected_hashes(buffer, Part::kWeights, Save::kUpdated),
                      .states = mover_.expected_hashes(buffer, Part::kStates, Save::kUpdated),
                      .gradient = spilled};
  }
  {
    const StallMeter::Wait wait(watch_.stalls, StallCause::kUpdate);
    const auto start = std::chrono::steady_clock::now();
    const auto update_one = [&](std::size_t node) {
      const TimedSpan span(watch_.timeline, SpanKind::kUpdate, queue_[first + node]);
      finite_[node] = update_tile(updates_[node], workers_);
    };
    if (nodes_ == 1) {
      update_one(0);
    } else {
      workers_.parallel_for_nodes(count, update_one);
    }
    adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  for (std::size_t node = 0; node < count; ++node) {
    mover_.verify(buffer_of(node));
    const std::uint32_t t = queue_[first + node];
    if (finite_[node] == 0 && begun_) refuse_overflow(tile_name(plan_, model_, t));
    if (finite_[node] == 0) {  // the step may come to nothing for another reason
      early_overflow_ = t;
      mover_.drop(buffer_of(node));
      return;
    }
    show(t, memories_[node]);
    mover_.start_save(buffer_of(node), Save::kUpdated, to ? to + byte_offset(t) : nullptr);
    if (!plan_.host.writes_behind) mover_.finish_save(buffer_of(node));
  }
}

void Updater::check(std::size_t first, std::size_t count, std::byte* to) {
  for (std::size_t i = first; i < first + count; ++i) {
    const auto buffer = static_cast<std::uint32_t>(i % mover_.buffers());
    wait_read(buffer);
    show(queue_[i], mover_.finish_load(buffer));
    to ? mover_.start_save(buffer, Save::kRestored, to + byte_offset(queue_[i])) : mover_.drop(buffer);
  }
}

void Updater::run_on_device(const ParameterUpdates& parameters) {
  const auto start = std::chrono::steady_clock::now();
  auto* finite = reinterpret_cast<std::uint32_t*>(device_.hbm().data() + plan_.hbm.finite.offset);
  device_.fill_async(finite, std::byte{1}, sizeof *finite, stream_);
  for (std::uint32_t t : order_) {
    const TilePlace& place = plan_.tile_places[t];
    TileMemory memory;
    for (std::size_t part = 0; part < kParts; ++part) memory.part[part] = device_.hbm().data() + place.offset[part];
    const std::byte* gradient = gradients_.gradient(plan_.tiles[t].block) + byte_offset(t);
    const StreamSpan span(watch_.timeline, {.kind = SpanKind::kUpdate, .subject = t}, stream_);
    std::uint64_t begin = 0;
    for (const GroupRange& range : parameters.ranges(t, ranges_[0])) {
      if (range.group != kNotUpdated) {
        device_.update_async(tile_arrays(place.shape, memory, gradient), parameters.scalars()[range.group], begin,
                             range.end, finite, stream_);
      }
      begin = range.end;
    }
  }
  auto* flag = reinterpret_cast<std::uint32_t*>(mover_.host().data() + plan_.host.overflow.offset);
  device_.copy_async(CopyKind::kDeviceToHost, flag, finite, sizeof *flag, stream_);
  stream_.synchronize();
  adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (*flag == 0) refuse_overflow("the device update");
}

std::uint64_t Updater::byte_offset(std::uint32_t tile) const {
  return plan_.tiles[tile].range.first * size_of(plan_.tile_places[tile].shape.type);
}

void Updater::refuse_overflow(const std::string& where) {
  overflowed_ = true;
  throw Error(Code::kNonFinite, {where, "a weight or optimizer state overflowed in the update", 0,
                                 "lower the learning rate or clip gradients; the last committed step is intact"});
}

}  // namespace spillway
