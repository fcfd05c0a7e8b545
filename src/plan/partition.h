// From the parameters of a block to shards and tiles. Pure arithmetic; nothing here knows where bytes live.
//
//   block    | reduced states | exact states         | frozen part      |    each part: a section for each
//            | mlp.weight    ░| wte  ░| ln_1.weight ░| adapter base   ░ |    description of states; ░: padding
//   shards   | rank 0            | rank 1            | rank 0 | rank 1  |
//   tiles    | tile | tile | tail| tile | tile | tail| tile   | tile    |
//
// Every parameter, shard and tile starts at a multiple of 1,024 elements (kNormLeaf, so that a leaf of the norm never
// crosses one), and no tile mixes elements of two sections. Offsets count elements of the block's flat vector.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "spillway/model.h"
#include "swap/extents.h"
#include "swap/rank.h"

namespace spillway {

inline constexpr std::uint64_t kPartitionUnit = 1024;

struct ParameterPlace {
  std::uint64_t first = 0;
  std::uint64_t count = 0;  // without the padding after it
  bool bytes = false;       // see Parameter
};

// Parameters whose states are described alike.
struct Section {
  std::uint64_t first = 0, elements = 0;  // padded
  bool trainable = true;
  StateList states = {};  // see TileShape
};

struct BlockPartition {
  std::uint64_t elements = 0;              // padded total
  std::uint64_t trainable_elements = 0;    // padded prefix
  std::vector<ParameterPlace> parameters;  // in the block's own order
  std::vector<Section> sections;           // as they lie
};

// Throws kInvalidArgument, naming the parameter, for an empty block, a name that is empty or not unique in it, and a
// shape that count_elements refuses.
// `states_of`, unless null: what describes the states of a trainable parameter; empty where they are exact. Sections
// lie as shown above, those of one part in the order of their first parameters.
BlockPartition partition_block(const Block& block, const std::function<StateList(const Parameter&)>& states_of = {});

struct Shard {
  std::uint64_t first = 0;
  std::uint64_t count = 0;  // a multiple of kPartitionUnit; 0 when there are more ranks than units
};

// Rank's share of the elements [first, first + count), a multiple of kPartitionUnit both. The shares of all ranks are
// disjoint, cover the range, and differ by at most kPartitionUnit; the larger ones come first.
Shard shard_of(std::uint64_t first, std::uint64_t count, Rank rank);

struct TileRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;  // tile_elements, or less in the last two of a shard; a multiple of kPartitionUnit
  bool trainable = true;
  StateList states = {};
};

// A section among all ranks: the slices of ranks 0, 1, … lie one after the other. What a rank has of a block's
// gradient is what it owns of the trainable sections, one after the other.
struct SectionShare {
  std::uint64_t first = 0;  // of the section
  bool trainable = true;
  std::vector<std::uint64_t> elements_of;  // by rank
  Shard own;
  std::uint64_t gradient_first = 0;  // of `own`, in the rank's part of the gradient
};
std::vector<SectionShare> share_sections(const BlockPartition& partition, Rank rank);
// What a rank has of a block's gradient.
std::uint64_t gradient_elements(const BlockPartition& partition, Rank rank);

// The tiles of one rank, in increasing order. tile_elements is a multiple of kPartitionUnit. What is left at the end of
// a shard is cut once more, so that the larger part is a multiple of kHashedTileUnit, or of kHashedByteUnit where an
// array has elements of one byte.
std::vector<TileRange> cut_tiles(const BlockPartition& partition, std::uint64_t tile_elements, Rank rank);

}  // namespace spillway
