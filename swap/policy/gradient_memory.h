// Where the gradients of a step lie on their way to the update, and when they leave. Pure: no thread, file, clock or
// device. It is told what has happened and answers what to do next; the GradientCollector does that on a device, the
// schedule on its virtual clock, so that each rule is here alone.
//
//            HBM                         d2h
//   parts ─► staging, several in turn ───┬──► memory of its own            home kHost
//                                        ├──► memory that it passes        no home: it is updated inside backward
//                                        └──► chunks ─► scratch area       home kNvme: spilled, always in one piece
//
//   come(block) ─► stage(block) … ─► complete(block) ─► updated(block)       copied(), written(staging) when they are
//
// With more open blocks than staging areas, what one block has so far goes down in parts, and another block gets its
// staging. Nothing is allocated after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "swap/tile_place.h"

namespace spillway {

struct GradientMemoryOptions {
  struct Block {
    std::uint64_t bytes = 0;       // of its rounded gradient
    Home home = Placement::kHost;  // kHbm: it stays where it is put together, and needs none of all this
    bool operator==(const Block&) const = default;
  };
  std::vector<Block> blocks;
  // In HBM, for gradients on their way down; in host memory, for those that pass. The first of each takes any.
  std::vector<std::uint64_t> staging_bytes, passing_bytes;
};

enum class DownWay : std::uint8_t {
  kStays,  // in HBM
  kWhole,
  kParts,  // whatever of it lies in staging; its norm is not known before all of it is down
  kSpill,  // whole, to NVMe
};

// What leaves staging now, or stays.
struct GradientDown {
  DownWay way = DownWay::kStays;
  std::uint32_t block = 0;
  std::uint32_t staging = 0;
  std::optional<std::uint32_t> passing = {};  // where it goes, when it passes
  bool operator==(const GradientDown&) const = default;
};

// What of a staging's last gradient must have happened before another may come there.
enum class StagingFree : std::uint8_t { kNow, kCopied, kWritten };

struct GradientStaging {
  std::uint32_t staging = 0;
  std::optional<GradientDown> down = {};  // first: what another block has there
  StagingFree free = StagingFree::kNow;   // then
  bool operator==(const GradientStaging&) const = default;
};

class GradientMemory {
 public:
  explicit GradientMemory(GradientMemoryOptions options);

  // Everything of the step before is forgotten, but for what is still leaving its staging.
  void begin_step();
  // False while the block's gradient is to pass through memory that others lie in: one of them must be updated before.
  bool has_room(std::uint32_t block) const;
  // Whose gradient keeps the block from getting staging: it is incomplete, and goes to NVMe as a whole.
  std::optional<std::uint32_t> in_the_way(std::uint32_t block) const;

  // A part of the block's gradient comes, for which there is room.
  void come(std::uint32_t block);
  // A part of it is put together, and nothing is in the way. Until it leaves it has that staging.
  GradientStaging stage(std::uint32_t block);
  // All of it has been put together.
  GradientDown complete(std::uint32_t block);
  // The block is updated, and its gradient of no use any more.
  void updated(std::uint32_t block);
  // Everything that went down and was not spilled is there.
  void copied();
  // What was spilled from there is written.
  void written(std::uint32_t staging);

  StagingFree leaving(std::uint32_t staging) const { return staging_[staging].leaving; }
  std::optional<std::uint32_t> passing(std::uint32_t block) const { return blocks_[block].passing; }

 private:
  struct Block {
    std::optional<std::uint32_t> staging, passing;
    bool parts = false;  // of it have gone down on their own
  };
  struct Staging {
    std::optional<std::uint32_t> block;
    StagingFree leaving = StagingFree::kNow;
  };

  std::uint32_t next_staging_for(std::uint32_t block) const;
  std::optional<std::uint32_t> free_passing(std::uint32_t block) const;
  GradientDown leave(std::uint32_t block);
  bool stays(std::uint32_t block) const { return options_.blocks[block].home == Placement::kHbm; }

  const GradientMemoryOptions options_;
  std::vector<Block> blocks_;
  std::vector<Staging> staging_;
  std::vector<std::optional<std::uint32_t>> passing_;  // whose gradient lies there
  std::uint32_t next_staging_ = 0;
};

}  // namespace spillway
