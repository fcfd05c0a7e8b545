#include "src/checkpoint/run_reader.h"

#include <algorithm>
#include <span>

#include "kernels/checksum.h"
#include "spillway/error.h"
#include "swap/store_check.h"

namespace spillway {

TileReader::TileReader(std::uint64_t tile_bytes, std::span<std::byte> memory) : memory_(memory) {
  if (memory.size() >= tile_bytes) return;
  memory_ = own_.emplace(align_up(tile_bytes, std::uint64_t{4096})).bytes();
}

TileMemory TileReader::read(const TileStore& store, std::uint32_t tile,
                            const std::function<std::string(std::uint32_t tile)>& name_of) {
  const TileStore::Slot slot = store.readable(tile);
  TileMemory memory;
  std::uint64_t at = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::uint64_t bytes = slot.extent[part].bytes;
    if (bytes == 0) continue;
    const std::span<std::byte> extent = memory_.subspan(at, bytes);
    memory.part[part] = extent.data();
    store.files().read_at(slot.extent[part].offset, extent);
    granules_.resize(div_up(bytes, kGranuleBytes));
    granule_checksums(extent, granules_);
    if (extent_checksum(granules_) != slot.checksum[part]) {
      throw mismatch_error(name_of_part(tile, static_cast<Part>(part), name_of),
                           store.files().place_of(slot.extent[part].offset), store.way_back(slot.extent[part].offset));
    }
    at += bytes;
  }
  return memory;
}

RunReader::RunReader(OpenRun& run, std::span<std::byte> memory, const TileStore::Progress& progress) {
  const auto common = newest_common(run.commits());
  for (const auto& rank : run.ranks) TileStore::refuse_one_slot(rank->files);
  if (!common) throw no_common_step(run.ranks[0]->files.files().front().path().parent_path(), run.commits());
  commit_ = *common;
  std::uint64_t largest = 0;
  for (const auto& rank : run.ranks) {
    auto part = std::make_unique<Part>(Part{rank->stored, rank->plan, nullptr});
    part->store = TileStore::found(std::move(rank->files), store_shape(part->plan), progress);
    if (part->store->commits().last != common) part->store->go_to_before();
    largest = std::max(largest, part->plan.host.buffer_bytes);
    const auto index = static_cast<std::uint32_t>(parts_.size());
    const std::vector<TilePlan>& tiles = part->plan.tiles;
    for (std::uint32_t t = 0; t < tiles.size(); ++t) tiles_.push_back({tiles[t].block, tiles[t].range.first, index, t});
    parts_.push_back(std::move(part));
  }
  std::ranges::sort(tiles_);
  reader_.emplace(largest, memory);
}

TileMemory RunReader::read(std::uint32_t rank, std::uint32_t tile) {
  const std::pair wanted(rank, tile);
  if (last_ == wanted) return of_last_;
  last_.reset();
  const Part& part = *parts_[rank];
  const auto name_of = [&](std::uint32_t t) { return tile_name(part.plan, part.stored.model, t); };
  of_last_ = reader_->read(*part.store, tile, name_of);
  last_ = wanted;
  return of_last_;
}

}  // namespace spillway
