#include "src/updater.h"

#include <algorithm>
#include <chrono>

#include "spillway/error.h"
#include "src/node_tiles.h"

namespace spillway {
namespace {

OptimizerTile tile_arrays(const TilePlace& place, const TileMemory& memory, const std::byte* gradient) {
  const StateOffsets at = state_offsets(place.shape);
  std::byte* states = memory.part[index_of(Part::kStates)];
  OptimizerTile tile;
  tile.type = place.shape.type;
  tile.weight = memory.part[index_of(Part::kWeights)];
  if (tile.type == DType::kBFloat16) tile.residual = reinterpret_cast<std::int16_t*>(states + at.master);
  if (tile.type == DType::kFloat16) tile.master = reinterpret_cast<float*>(states + at.master);
  if (has_exp_avg(place.shape.optimizer)) tile.exp_avg = reinterpret_cast<float*>(states + at.exp_avg);
  if (has_exp_avg_sq(place.shape.optimizer)) tile.exp_avg_sq = reinterpret_cast<float*>(states + at.exp_avg_sq);
  tile.gradient = gradient;
  tile.count = place.shape.count;
  return tile;
}

}  // namespace

Updater::Updater(const Plan& plan, const ModelDescription& model, Device& device, HostWorkers& workers,
                 TileMover& mover, GradientCollector& gradients, Stream& stream)
    : plan_(plan),
      model_(model),
      device_(device),
      workers_(workers),
      mover_(mover),
      gradients_(gradients),
      stream_(stream),
      nodes_(updating_nodes(plan, workers.nodes())),
      order_(update_order(plan, nodes_)),
      block_begin_(plan.blocks.size(), order_.size()),
      block_end_(plan.blocks.size(), 0),
      next_(order_.size()),
      updates_(nodes_),
      finite_(nodes_) {
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const std::uint32_t block = plan.tiles[order_[i]].block;
    block_begin_[block] = std::min(block_begin_[block], i);
    block_end_[block] = i + 1;
  }
}

// Tile i uses buffer i mod buffers. A load starts when its buffer's last save is done; only the `count` tiles that are
// due wait.
void Updater::start_loads(std::size_t due, std::size_t count) {
  const std::uint32_t buffers = mover_.buffers();
  while (loading_ < order_.size() && loading_ < due + buffers) {
    const auto buffer = static_cast<std::uint32_t>(loading_ % buffers);
    if (loading_ >= due + count && !mover_.idle(buffer)) return;
    mover_.start_load(order_[loading_], buffer);
    ++loading_;
  }
}

void Updater::read_ahead() {
  if (!plan_.gradients_in_hbm) start_loads(0, nodes_);
}

void Updater::cancel_read_ahead() {
  for (std::size_t i = 0; i < loading_; ++i) {
    mover_.finish_load(static_cast<std::uint32_t>(i));
    mover_.drop(static_cast<std::uint32_t>(i));
  }
  loading_ = 0;
}

void Updater::begin(std::span<const OptimizerScalars> scalars) {
  if (plan_.gradients_in_hbm) return run_on_device(scalars);
  scalars_ = scalars;
  next_ = 0;
}

bool Updater::run_until(std::uint32_t block, std::byte* to) {
  // All of the block, and nothing else: frozen tiles are fetched, and with several nodes tiles of two blocks may be
  // updated at the same time.
  const std::size_t count = block_end_[block] - std::min(block_begin_[block], block_end_[block]);
  const bool whole = nodes_ == 1 && next_ <= block_begin_[block] && count == plan_.blocks[block].tiles;
  while (next_ < block_end_[block]) {
    const std::size_t together = std::min<std::size_t>(nodes_, order_.size() - next_);
    start_loads(next_, together);
    update(next_, together, whole && next_ >= block_begin_[block] ? to : nullptr);
    next_ += together;
  }
  if (under_way()) start_loads(next_, 0);
  return to != nullptr && whole;
}

void Updater::settle(std::uint32_t block) {
  const BlockPlan& plan = plan_.blocks[block];
  mover_.finish_saves_of(plan.first_tile, plan.first_tile + plan.tiles);
}

void Updater::finish() {
  while (under_way()) run_until(plan_.tiles[order_.back()].block, nullptr);
  for (std::uint32_t b = 0; b < mover_.buffers(); ++b) mover_.finish_save(b);
  loading_ = 0;
}

// Tiles [first, first + count) of the order, one for each node. The bytes are verified in the pass that updates them: a
// mismatch is found behind the pass and before anything of the tile is saved.
void Updater::update(std::size_t first, std::size_t count, std::byte* to) {
  const auto buffer_of = [this, first](std::size_t node) {
    return static_cast<std::uint32_t>((first + node) % mover_.buffers());
  };
  for (std::size_t node = 0; node < count; ++node) {
    const std::uint32_t t = order_[first + node], buffer = buffer_of(node);
    const TilePlan& place = plan_.tiles[t];
    const TileMemory memory = mover_.arrive(buffer);
    const std::byte* gradient = gradients_.gradient(place.block) + byte_offset(t);
    updates_[node] = {.tile = tile_arrays(plan_.tile_places[t], memory, gradient),
                      .groups = place.groups,
                      .scalars = scalars_,
                      .weights = mover_.expected_hashes(buffer, Part::kWeights, Save::kUpdated),
                      .states = mover_.expected_hashes(buffer, Part::kStates, Save::kUpdated)};
  }
  const auto start = std::chrono::steady_clock::now();
  const auto update_one = [&](std::size_t node) { finite_[node] = update_tile(updates_[node], workers_); };
  if (nodes_ == 1) {
    update_one(0);
  } else {
    workers_.parallel_for_nodes(count, update_one);
  }
  adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::size_t node = 0; node < count; ++node) {
    mover_.verify(buffer_of(node));
    const std::uint32_t t = order_[first + node];
    if (finite_[node] == 0) overflowed(tile_name(plan_, model_, t));
    mover_.start_save(buffer_of(node), Save::kUpdated, to ? to + byte_offset(t) : nullptr);
  }
}

void Updater::run_on_device(std::span<const OptimizerScalars> scalars) {
  const auto start = std::chrono::steady_clock::now();
  auto* finite = reinterpret_cast<std::uint32_t*>(device_.hbm().data() + plan_.hbm.finite.offset);
  device_.fill_async(finite, std::byte{1}, sizeof *finite, stream_);
  for (std::uint32_t t : order_) {
    const TilePlace& place = plan_.tile_places[t];
    TileMemory memory;
    for (std::size_t part = 0; part < kParts; ++part) memory.part[part] = device_.hbm().data() + place.offset[part];
    const std::byte* gradient = gradients_.gradient(plan_.tiles[t].block) + byte_offset(t);
    std::uint64_t begin = 0;
    for (const GroupRange& range : plan_.tiles[t].groups) {
      device_.update_async(tile_arrays(place, memory, gradient), scalars[range.group], begin, range.end, finite,
                           stream_);
      begin = range.end;
    }
  }
  // The flag comes down through the page behind the norms.
  const std::uint32_t flag = gradients_.fetch_flag(finite, stream_);
  adam_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (flag == 0) overflowed("the device update");
}

std::uint64_t Updater::byte_offset(std::uint32_t tile) const {
  return plan_.tiles[tile].range.first * size_of(plan_.tile_places[tile].shape.type);
}

void Updater::overflowed(const std::string& where) const {
  throw Error(Code::kNonFinite, {where, "a weight or optimizer state overflowed in the update", 0,
                                 "lower the learning rate or clip gradients; the last committed step is intact"});
}

}  // namespace spillway
