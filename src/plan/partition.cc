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

BlockPartition partition_block(const Block& block, const std::function<StateList(const Parameter&)>& states_of) {
  check_names(block);
  BlockPartition partition;
  partition.parameters.resize(block.parameters.size());
  const auto belongs = [&](const Parameter& parameter, const Section& section) {
    if (!parameter.trainable || !section.trainable) return parameter.trainable == section.trainable;
    return std::ranges::equal(states_of ? states_of(parameter) : StateList{}, section.states);
  };
  for (const Parameter& parameter : block.parameters) {
    if (std::ranges::any_of(partition.sections, [&](const Section& s) { return belongs(parameter, s); })) continue;
    const bool trainable = parameter.trainable;
    partition.sections.push_back(
        {.trainable = trainable, .states = trainable && states_of ? states_of(parameter) : StateList{}});
  }
  std::ranges::stable_sort(partition.sections, {}, [](const Section& section) {
    return !section.trainable ? 2 : section.states.empty() ? 1 : 0;
  });
  for (Section& section : partition.sections) {
    section.first = partition.elements;
    for (std::size_t i = 0; i < block.parameters.size(); ++i) {
      const Parameter& parameter = block.parameters[i];
      if (!belongs(parameter, section)) continue;
      const std::uint64_t count = count_elements(parameter.name, parameter.shape);
      partition.parameters[i] = {partition.elements, count, parameter.bytes};
      partition.elements += align_up(count, kPartitionUnit);
      if (partition.elements > kMostElements) {
        refuse("block " + block.name, "it has more than 2^55 elements", "check the shapes");
      }
    }
    section.elements = partition.elements - section.first;
    if (section.trainable) partition.trainable_elements = partition.elements;
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

std::vector<SectionShare> share_sections(const BlockPartition& partition, Rank rank) {
  std::vector<SectionShare> shares;
  std::uint64_t gradient = 0;
  for (const Section& section : partition.sections) {
    SectionShare share{.first = section.first,
                       .trainable = section.trainable,
                       .elements_of = {},
                       .own = shard_of(section.first, section.elements, rank),
                       .gradient_first = gradient};
    for (std::uint32_t r = 0; r < rank.count; ++r)
      share.elements_of.push_back(shard_of(section.first, section.elements, {r, rank.count}).count);
    if (section.trainable) gradient += share.own.count;
    shares.push_back(std::move(share));
  }
  return shares;
}

std::uint64_t gradient_elements(const BlockPartition& partition, Rank rank) {
  std::uint64_t elements = 0;
  for (const Section& section : partition.sections)
    elements += section.trainable ? shard_of(section.first, section.elements, rank).count : 0;
  return elements;
}

std::vector<TileRange> cut_tiles(const BlockPartition& partition, std::uint64_t tile_elements, Rank rank) {
  SPILLWAY_CHECK(tile_elements > 0 && tile_elements % kPartitionUnit == 0, "tiles are multiples of 1,024 elements");
  std::vector<TileRange> tiles;
  for (const Section& section : partition.sections) {
    const Shard shard = shard_of(section.first, section.elements, rank);
    const bool bytes = std::ranges::find(section.states, 1u, &StateArray::bytes) != section.states.end();
    const std::uint64_t unit = bytes ? kHashedByteUnit : kHashedTileUnit;
    for (std::uint64_t done = 0; done < shard.count; done += tiles.back().count) {
      const std::uint64_t left = shard.count - done, whole = align_down(left, unit);
      tiles.push_back({.first = shard.first + done,
                       .count = std::min(tile_elements, whole > 0 ? whole : left),
                       .trainable = section.trainable,
                       .states = section.states});
    }
  }
  return tiles;
}

}  // namespace spillway
