#include "src/engine/rank_tiles.h"

#include <fmt/format.h>

#include "spillway/error.h"

namespace spillway {

RankTiles::RankTiles(Agreement& agreement, const Plan& own, const std::function<Plan(Rank)>& plan_of,
                     std::span<std::byte> buffer, Work work)
    : agreement_(agreement), own_(own), buffer_(buffer), work_(std::move(work)) {
  if (own.rank.count == 1) return;
  for (std::uint32_t r = 0; r < agreement.rank().count; ++r) {
    // Plans are a pure function of configuration, model and rank: nobody has to send them.
    others_.push_back(r == agreement.rank().index ? Plan() : plan_of({r, agreement.rank().count}));
  }
  order_turns();
}

void RankTiles::order_turns() {
  const std::uint32_t ranks = agreement_.rank().count;
  std::vector<std::uint32_t> next(ranks);  // tile of each
  for (std::uint32_t b = 0; b < own_.blocks.size(); ++b) {
    for (const Section& section : own_.blocks[b].partition.sections) {
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const std::vector<TilePlan>& tiles = plan_of(r).tiles;
        const auto here = [&](const TilePlan& tile) {
          return tile.block == b && tile.range.first < section.first + section.elements;
        };
        while (next[r] < tiles.size() && here(tiles[next[r]])) turns_.push_back({r, next[r]++});
      }
    }
  }
}

void RankTiles::visit_own(std::uint32_t tile, const TileMemory& memory) {
  if (own_.rank.count == 1) return work_(own_, tile, memory);  // whoever shows hears of its failure
  const std::uint32_t own = agreement_.rank().index;
  // Tiles of other ranks that come before this one in the order of one rank.
  while (turns_[next_].rank != own) visit_other(turns_[next_++]);
  SPILLWAY_CHECK(turns_[next_].tile == tile, "tiles are shown in their order, and all of them");
  ++next_;
  for (const Part part : {Part::kWeights, Part::kStates}) {
    const std::uint64_t bytes = payload_bytes(own_.tile_places[tile].shape, part);
    if (bytes > 0) agreement_.broadcast({memory.part[index_of(part)], bytes}, own);
  }
  visit(own_, tile, memory);
}

void RankTiles::visit_other(const Turn& turn) {
  const Plan& plan = plan_of(turn.rank);
  TileMemory memory;
  std::uint64_t used = 0;
  for (const Part part : {Part::kWeights, Part::kStates}) {
    const TileShape& shape = plan.tile_places[turn.tile].shape;
    const std::uint64_t bytes = payload_bytes(shape, part);
    if (bytes == 0) continue;
    SPILLWAY_CHECK(used + bytes <= buffer_.size(), "there is room for a tile of any rank");
    memory.part[index_of(part)] = buffer_.data() + used;
    agreement_.broadcast(buffer_.subspan(used, bytes), turn.rank);
    used += extent_bytes(shape, part);
  }
  visit(plan, turn.tile, memory);
}

void RankTiles::visit(const Plan& plan, std::uint32_t tile, const TileMemory& memory) {
  // The ranks go on with their broadcasts: one that left would make the others wait for ever.
  if (failure_) return;
  try {
    work_(plan, tile, memory);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

std::exception_ptr RankTiles::finish() {
  while (next_ < turns_.size()) visit_other(turns_[next_++]);
  return joint_failure(agreement_, failure_);
}

std::exception_ptr joint_failure(Agreement& agreement, std::exception_ptr own) {
  if (agreement.alone()) return own;
  const std::vector<std::uint64_t> failed = agreement.gather(own ? 1 : 0);
  for (std::uint32_t r = 0; r < failed.size() && !own; ++r) {
    if (failed[r] == 0) continue;
    own = std::make_exception_ptr(
        Error(Code::kInvalidArgument,
              {fmt::format("rank {}", r), "has failed in what it was asked for", 0, "see what it says"}));
  }
  return own;
}

}  // namespace spillway
