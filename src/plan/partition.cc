#include "src/plan/partition.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "kernels/tile_update.h"
#include "spillway/error.h"
#include "spillway/units.h"
#include "src/formats/element_count.h"

namespace spillway {
namespace {

[[noreturn]] void refuse(const std::string& object, std::string happened, std::string hint) {
  throw Error(Code::kInvalidArgument,
              {.object = object, .happened = std::move(happened), .errno_value = 0, .hint = std::move(hint)});
}

void check_names(const Block& block) {
  if (block.parameters.empty()) refuse("block " + block.name, "it has no parameters", "leave it out");
  std::unordered_set<std::string_view> names;
  for (const Parameter& parameter : block.parameters) {
    if (parameter.name.empty())
      refuse("block " + block.name, "a parameter has no name", "names identify tensors in files");
    if (!names.insert(parameter.name).second) refuse(parameter.name, "the name occurs twice", "names must be unique");
  }
}

}  // namespace

BlockPartition partition_block(const Block& block) {
  check_names(block);
  BlockPartition partition;
  partition.parameters.resize(block.parameters.size());
  for (const bool trainable : {true, false}) {
    for (std::size_t i = 0; i < block.parameters.size(); ++i) {
      const Parameter& parameter = block.parameters[i];
      if (parameter.trainable != trainable) continue;
      const std::uint64_t count = count_elements(parameter.name, parameter.shape);
      partition.parameters[i] = {partition.elements, count};
      partition.elements += align_up(count, kPartitionUnit);
      if (partition.elements > kMostElements) {
        refuse("block " + block.name, "it has more than 2^55 elements", "check the shapes");
      }
    }
    if (trainable) partition.trainable_elements = partition.elements;
  }
  return partition;
}

Shard shard_of(std::uint64_t first, std::uint64_t count, Rank rank) {
  SPILLWAY_CHECK(rank.index < rank.count, "a rank must be one of the ranks");
  SPILLWAY_CHECK(first % kPartitionUnit == 0 && count % kPartitionUnit == 0, "shards start at multiples of 1,024");
  const std::uint64_t units = count / kPartitionUnit;
  const std::uint64_t each = units / rank.count,
                      left = units % rank.count;  // the first `left` ranks take one unit more
  const std::uint64_t before = rank.index * each + std::min<std::uint64_t>(rank.index, left);
  return {first + before * kPartitionUnit, (each + (rank.index < left ? 1 : 0)) * kPartitionUnit};
}

std::vector<TileRange> cut_tiles(const BlockPartition& partition, std::uint64_t tile_elements, Rank rank) {
  SPILLWAY_CHECK(tile_elements > 0 && tile_elements % kPartitionUnit == 0, "tiles are multiples of 1,024 elements");
  std::vector<TileRange> tiles;
  for (const bool trainable : {true, false}) {
    const std::uint64_t begin = trainable ? 0 : partition.trainable_elements;
    const std::uint64_t end = trainable ? partition.trainable_elements : partition.elements;
    const Shard shard = shard_of(begin, end - begin, rank);
    for (std::uint64_t done = 0; done < shard.count; done += tiles.back().count) {
      const std::uint64_t left = shard.count - done, whole = left / kHashedTileUnit * kHashedTileUnit;
      tiles.push_back({shard.first + done, std::min(tile_elements, whole > 0 ? whole : left), trainable});
    }
  }
  return tiles;
}

}  // namespace spillway
