#include "src/engine/gradient_spills.h"

#include <algorithm>
#include <utility>

#include "kernels/checksum.h"
#include "spillway/error.h"

namespace spillway {

GradientSpills::GradientSpills(const Plan& plan, Device& device, BlockSpiller& spiller, std::uint64_t scratch_offset)
    : plan_(plan),
      spiller_(spiller),
      scratch_offset_(scratch_offset),
      block_(plan.hbm.staging.size()),
      checksums_(plan.tiles.size()) {
  std::size_t most_tiles = 0;
  std::uint64_t largest = 0;
  for (const BlockPlan& block : plan.blocks) {
    most_tiles = std::max<std::size_t>(most_tiles, block.tiles);
    const std::uint64_t element = size_of(plan.tile_places[0].shape.type);
    largest = std::max(largest, block.gradient_elements * element);
  }
  // Each tile's piece is padded to whole extents, and so may end in a granule of its own.
  const std::uint64_t bytes = largest + most_tiles * kExtentAlignment;
  for (std::size_t s = 0; s < plan.hbm.staging.size(); ++s) {
    spills_.push_back(std::make_unique<BlockSpill>(device, most_tiles, div_up(bytes, kGranuleBytes) + most_tiles));
  }
}

GradientSpills::~GradientSpills() {
  for (std::uint32_t s = 0; s < spills_.size(); ++s) {
    try {
      wait_written(s);
    } catch (const Error&) {  // nobody reads it any more
    }
  }
}

void GradientSpills::start(std::uint32_t staging, std::uint32_t b, const std::byte* from, Event& after) {
  const BlockPlan& block = plan_.blocks[b];
  BlockSpill& spill = *spills_[staging];
  // One piece a tile: the tile reads its own gradient back, and verifies it by its own checksum.
  spill.pieces.clear();
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    const TilePlan& tile = plan_.tiles[t];
    if (!tile.range.trainable) continue;
    const std::uint64_t element = size_of(plan_.tile_places[t].shape.type);
    spill.pieces.push_back({.from = from + tile.gradient_first * element,
                            .payload_bytes = tile.range.count * element,
                            .extent = {scratch_offset_ + tile.gradient.offset, tile.gradient.bytes}});
  }
  spill.after = &after;
  block_[staging] = b;
  spiller_.start(spill);
}

void GradientSpills::wait_written(std::uint32_t staging) {
  const std::optional<std::uint32_t> b = std::exchange(block_[staging], std::nullopt);
  if (!b) return;
  spiller_.wait_written(*spills_[staging]);
  const BlockPlan& block = plan_.blocks[*b];
  auto piece = spills_[staging]->pieces.begin();
  for (std::uint32_t t = block.first_tile; t < block.first_tile + block.tiles; ++t) {
    if (plan_.tiles[t].range.trainable) checksums_[t] = (piece++)->checksum;
  }
}

std::optional<GradientSpills::Spilled> GradientSpills::spilled(std::uint32_t t) const {
  const TilePlan& tile = plan_.tiles[t];
  if (plan_.blocks[tile.block].gradient_home != Placement::kNvme) return std::nullopt;
  return Spilled{{scratch_offset_ + tile.gradient.offset, tile.gradient.bytes}, checksums_[t]};
}

}  // namespace spillway
