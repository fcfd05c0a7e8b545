#include "src/optimizer/caller_tensors.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/checksum.h"
#include "spillway/fp16.h"
#include "swap/tile_arrays.h"

namespace spillway {
namespace {

constexpr std::uint64_t kPieceElements = 16 * kKiB;

template <typename Element>
Element* moved(Element* array, std::uint64_t elements) {
  return array == nullptr ? nullptr : array + elements;
}

std::uint64_t padding_behind(const TensorPiece& piece) {
  return align_up(std::uint64_t{piece.count}, kPartitionUnit) - piece.count;
}

}  // namespace

CallerTensors::CallerTensors(const Plan& plan, const ModelDescription& model, const Memory& memory,
                             TensorCarrier* carrier)
    : plan_(plan),
      element_(size_of(plan.tile_places[0].shape.type)),
      checksums_(reinterpret_cast<std::uint64_t*>(memory.checksums.data()),
                 memory.checksums.size() / sizeof(std::uint64_t)) {
  for (std::uint32_t b = 0; b < model.blocks.size(); ++b) {
    first_of_.push_back(count());
    for (const Parameter& parameter : model.blocks[b].parameters) {
      names_.push_back(&parameter.name);
      block_of_.push_back(b);
    }
  }
  std::size_t units = 0;
  for (const TilePlan& tile : plan.tiles) {
    first_piece_.push_back(pieces_.size());
    first_unit_.push_back(units);
    units += tile.range.count / kPartitionUnit;
    const auto& places = plan.blocks[tile.block].partition.parameters;
    for (std::uint32_t p = 0; p < places.size(); ++p) {
      const std::uint64_t begin = std::max(places[p].first, tile.range.first);
      const std::uint64_t end = std::min(places[p].first + places[p].count, tile.range.first + tile.range.count);
      for (std::uint64_t at = begin; at < end; at += kPieceElements) {
        pieces_.push_back({.tensor = index(tile.block, p),
                           .count = static_cast<std::uint32_t>(std::min(kPieceElements, end - at)),
                           .first = at - places[p].first,
                           .at = at - tile.range.first});
      }
    }
  }
  first_piece_.push_back(pieces_.size());
  first_unit_.push_back(units);
  staging_.emplace(plan, pieces_, first_piece_, memory.staging, carrier);
}

std::uint32_t CallerTensors::tile_of(std::size_t piece) const {
  return static_cast<std::uint32_t>(std::ranges::upper_bound(first_piece_, piece) - first_piece_.begin() - 1);
}

template <typename Unit>
void CallerTensors::for_each_unit(std::uint32_t tile, const TensorPiece& piece, Unit&& unit) const {
  if (checksums_.empty()) return;
  std::uint64_t* checksum = &checksums_[first_unit_[tile] + piece.at / kPartitionUnit];
  for (std::uint64_t at = 0; at < piece.count; at += kPartitionUnit, ++checksum) {
    unit(*checksum, at, std::min<std::uint64_t>(kPartitionUnit, piece.count - at));
  }
}

void CallerTensors::renew(std::uint32_t tile, const TensorPiece& piece, const void* weight,
                          const OptimizerTile& arrays) const {
  const auto* weights = static_cast<const std::uint16_t*>(weight);
  for_each_unit(tile, piece, [&](std::uint64_t checksum, std::uint64_t at, std::uint64_t count) {
    if (granule_checksum(std::as_bytes(std::span(weights + at, count))) == checksum) return;
    if (arrays.residual) std::fill_n(arrays.residual + piece.at + at, count, std::int16_t{0});
    if (arrays.master) std::transform(weights + at, weights + at + count, arrays.master + piece.at + at, fp16_to_float);
  });
}

void CallerTensors::note(std::uint32_t tile, const TensorPiece& piece, const void* weight) {
  const auto* weights = static_cast<const std::uint16_t*>(weight);
  for_each_unit(tile, piece, [&](std::uint64_t& checksum, std::uint64_t at, std::uint64_t count) {
    checksum = granule_checksum(std::as_bytes(std::span(weights + at, count)));
  });
}

// What of the tile is elsewhere.
void CallerTensors::fetch(std::uint32_t tile, std::byte* weights, std::byte* gradients,
                          std::span<const OptimizerTensor> tensors, HostWorkers& workers) {
  for (const TensorStaging::Chunk& chunk : staging_->chunks(tile)) {
    if (!staging_->brought(chunk)) continue;
    const TensorStaging::Slot slot = staging_->arrive(chunk);
    workers.parallel_for(chunk.end - chunk.first, [&](std::size_t i) {
      const TensorPiece& piece = pieces_[chunk.first + i];
      const OptimizerTensor& tensor = tensors[piece.tensor];
      const std::uint64_t from = (piece.at - chunk.at) * element_, to = piece.at * element_;
      if (is_elsewhere(tensor.weight)) std::memcpy(weights + to, slot.weights + from, piece.count * element_);
      if (gradients && is_elsewhere(tensor.gradient))
        std::memcpy(gradients + to, slot.gradients + from, piece.count * element_);
    });
    staging_->release(slot);
  }
}

void CallerTensors::deliver(std::uint32_t tile, const std::byte* weights, std::span<const OptimizerTensor> tensors,
                            HostWorkers& workers) {
  const auto goes = [&](const TensorPiece& piece) { return is_elsewhere(tensors[piece.tensor].weight); };
  for (const TensorStaging::Chunk& chunk : staging_->chunks(tile)) {
    const auto all = std::span(pieces_).subspan(chunk.first, chunk.end - chunk.first);
    if (std::ranges::none_of(all, goes)) continue;
    const TensorStaging::Slot slot = staging_->take();
    workers.parallel_for(all.size(), [&](std::size_t i) {
      if (!goes(all[i])) return;
      std::memcpy(slot.weights + (all[i].at - chunk.at) * element_, weights + all[i].at * element_,
                  all[i].count * element_);
    });
    staging_->give(chunk, slot);
  }
}

bool CallerTensors::gather(std::uint32_t tile, const TileMemory& memory, std::byte* gradients,
                           std::span<const OptimizerTensor> tensors, HostWorkers& workers) {
  const TileShape& shape = plan_.tile_places[tile].shape;
  std::byte* const weights = memory.part[index_of(Part::kWeights)];
  fetch(tile, weights, gradients, tensors, workers);
  const std::span<const TensorPiece> all = pieces(tile);
  std::atomic<bool> written = false;
  workers.parallel_for(all.size(), [&](std::size_t i) {
    const TensorPiece& piece = all[i];
    const OptimizerTensor& tensor = tensors[piece.tensor];
    if (gradients && tensor.gradient != nullptr) {
      std::byte* const to = gradients + piece.at * element_;
      if (!is_elsewhere(tensor.gradient))
        std::memcpy(to, static_cast<const std::byte*>(tensor.gradient) + piece.first * element_,
                    piece.count * element_);
      std::memset(to + piece.count * element_, 0, padding_behind(piece) * element_);
    }
    std::byte* const to = weights + piece.at * element_;
    if (!is_elsewhere(tensor.weight))
      std::memcpy(to, static_cast<const std::byte*>(tensor.weight) + piece.first * element_, piece.count * element_);
    std::memset(to + piece.count * element_, 0, padding_behind(piece) * element_);
    for_each_unit(tile, piece, [&](std::uint64_t checksum, std::uint64_t at, std::uint64_t count) {
      if (granule_checksum({to + at * element_, count * element_}) != checksum)
        written.store(true, std::memory_order_relaxed);
    });
  });
  const std::uint64_t payload = payload_bytes(shape, Part::kWeights);
  std::memset(weights + payload, 0, extent_bytes(shape, Part::kWeights) - payload);
  return written;
}

void CallerTensors::renew_all(std::uint32_t tile, const TileMemory& memory, HostWorkers& workers) const {
  const OptimizerTile arrays = tile_arrays(plan_.tile_places[tile].shape, memory, nullptr);
  const std::span<const TensorPiece> all = pieces(tile);
  workers.parallel_for(all.size(), [&](std::size_t i) {
    renew(tile, all[i], static_cast<const std::byte*>(arrays.weight) + all[i].at * element_, arrays);
  });
}

void CallerTensors::take(std::uint32_t tile, const TileMemory& memory, std::span<const OptimizerTensor> tensors,
                         HostWorkers& workers) {
  if (!checksums_.empty()) {  // 0 is the checksum of nothing that is there
    const auto first = checksums_.begin() + static_cast<std::ptrdiff_t>(first_unit_[tile]);
    std::fill(first, checksums_.begin() + static_cast<std::ptrdiff_t>(first_unit_[tile + 1]), std::uint64_t{0});
  }
  gather(tile, memory, nullptr, tensors, workers);
  renew_all(tile, memory, workers);
  const std::byte* const weights = memory.part[index_of(Part::kWeights)];
  const std::span<const TensorPiece> all = pieces(tile);
  workers.parallel_for(all.size(), [&](std::size_t i) { note(tile, all[i], weights + all[i].at * element_); });
}

void CallerTensors::scatter(std::uint32_t tile, const TileMemory& memory, std::span<const OptimizerTensor> tensors,
                            HostWorkers& workers) {
  const std::byte* const weights = memory.part[index_of(Part::kWeights)];
  const std::span<const TensorPiece> all = pieces(tile);
  workers.parallel_for(all.size(), [&](std::size_t i) {
    const TensorPiece& piece = all[i];
    const std::byte* const from = weights + piece.at * element_;
    void* const weight = tensors[piece.tensor].weight;
    if (!is_elsewhere(weight))
      std::memcpy(static_cast<std::byte*>(weight) + piece.first * element_, from, piece.count * element_);
    note(tile, piece, from);
  });
  deliver(tile, weights, tensors, workers);
}

OptimizerTile CallerTensors::arrays_of(const TensorPiece& piece, const OptimizerTile& tile,
                                       const OptimizerTensor& tensor, const TensorStaging::Slot& slot,
                                       std::uint64_t slot_begins) const {
  OptimizerTile arrays = tile;
  const std::uint64_t of_tensor = piece.first * element_, of_slot = (piece.at - slot_begins) * element_;
  arrays.weight =
      is_elsewhere(tensor.weight) ? slot.weights + of_slot : static_cast<std::byte*>(tensor.weight) + of_tensor;
  arrays.gradient = is_elsewhere(tensor.gradient) ? slot.gradients + of_slot
                                                  : static_cast<const std::byte*>(tensor.gradient) + of_tensor;
  arrays.residual = moved(tile.residual, piece.at);
  arrays.master = moved(tile.master, piece.at);
  arrays.exp_avg = moved(tile.exp_avg, piece.at);
  arrays.exp_avg_sq = moved(tile.exp_avg_sq, piece.at);
  ReducedMoments& reduced = arrays.reduced;
  const std::uint64_t moment = piece.at * size_of(reduced.format);
  reduced.exp_avg = moved(static_cast<std::byte*>(reduced.exp_avg), moment);
  reduced.exp_avg_sq = moved(static_cast<std::byte*>(reduced.exp_avg_sq), moment);
  reduced.exp_avg_scales = moved(reduced.exp_avg_scales, piece.at / kMomentGroup);
  reduced.exp_avg_sq_scales = moved(reduced.exp_avg_sq_scales, piece.at / kMomentGroup);
  reduced.index += piece.at;
  arrays.count = piece.count;
  return arrays;
}

}  // namespace spillway
