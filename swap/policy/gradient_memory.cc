#include "swap/policy/gradient_memory.h"

#include <algorithm>
#include <utility>

#include "spillway/error.h"

namespace spillway {

GradientMemory::GradientMemory(GradientMemoryOptions options)
    : options_(std::move(options)),
      blocks_(options_.blocks.size()),
      staging_(options_.staging_bytes.size()),
      passing_(options_.passing_bytes.size()) {}

void GradientMemory::begin_step() {
  std::ranges::fill(blocks_, Block{});
  for (Staging& staging : staging_) staging.block.reset();
  for (auto& passing : passing_) passing.reset();
}

// The last that fits: only the first need hold the largest.
std::optional<std::uint32_t> GradientMemory::free_passing(std::uint32_t block) const {
  for (auto i = static_cast<std::uint32_t>(passing_.size()); i-- > 0;) {
    if (!passing_[i] && options_.passing_bytes[i] >= options_.blocks[block].bytes) return i;
  }
  return std::nullopt;
}

bool GradientMemory::has_room(std::uint32_t block) const {
  return options_.blocks[block].home || blocks_[block].passing || free_passing(block);
}

// A free one that is large enough, in turn; with none free, the first in turn that is large enough.
std::uint32_t GradientMemory::next_staging_for(std::uint32_t block) const {
  const auto count = static_cast<std::uint32_t>(staging_.size());
  const auto fits = [&](std::uint32_t i) { return options_.staging_bytes[i] >= options_.blocks[block].bytes; };
  std::uint32_t index = next_staging_;
  for (std::uint32_t i = 0; i < count && (staging_[index].block || !fits(index)); ++i) index = (index + 1) % count;
  while (!fits(index)) index = (index + 1) % count;  // the first holds the largest
  return index;
}

std::optional<std::uint32_t> GradientMemory::in_the_way(std::uint32_t block) const {
  if (stays(block) || blocks_[block].staging) return std::nullopt;
  const std::optional<std::uint32_t> holder = staging_[next_staging_for(block)].block;
  return holder && options_.blocks[*holder].home == Placement::kNvme ? holder : std::nullopt;
}

void GradientMemory::come(std::uint32_t b) {
  Block& block = blocks_[b];
  if (options_.blocks[b].home || block.passing) return;
  block.passing = free_passing(b);
  SPILLWAY_CHECK(block.passing, "has_room() was asked");
  passing_[*block.passing] = b;
}

GradientStaging GradientMemory::stage(std::uint32_t b) {
  SPILLWAY_CHECK(!stays(b), "what stays in HBM needs no staging");
  Block& block = blocks_[b];
  // Pushes of a block go on where they began, until it leaves.
  if (block.staging) return {.staging = *block.staging};
  GradientStaging answer{.staging = next_staging_for(b)};
  Staging& staging = staging_[answer.staging];
  // None is free: what the block in it has so far goes down, and its later pushes get another one.
  if (staging.block) {
    SPILLWAY_CHECK(!in_the_way(b), "what is spilled goes down whole");
    blocks_[*staging.block].parts = true;
    answer.down = leave(*staging.block);
  }
  // In turn, so that a staging area's last copy down has the longest time to end.
  next_staging_ = (answer.staging + 1) % static_cast<std::uint32_t>(staging_.size());
  answer.free = std::exchange(staging.leaving, StagingFree::kNow);
  staging.block = b;
  block.staging = answer.staging;
  return answer;
}

GradientDown GradientMemory::complete(std::uint32_t block) {
  return stays(block) ? GradientDown{.way = DownWay::kStays, .block = block} : leave(block);
}

GradientDown GradientMemory::leave(std::uint32_t b) {
  Block& block = blocks_[b];
  SPILLWAY_CHECK(block.staging, "what goes down was staged");
  const bool spilled = options_.blocks[b].home == Placement::kNvme;
  const GradientDown down{.way = spilled       ? DownWay::kSpill
                                 : block.parts ? DownWay::kParts
                                               : DownWay::kWhole,
                          .block = b,
                          .staging = *block.staging,
                          .passing = block.passing};
  staging_[down.staging] = {.block = {}, .leaving = spilled ? StagingFree::kWritten : StagingFree::kCopied};
  block.staging.reset();
  return down;
}

void GradientMemory::updated(std::uint32_t b) {
  if (blocks_[b].passing) passing_[*blocks_[b].passing].reset();
}

void GradientMemory::copied() {
  for (Staging& staging : staging_) {
    if (staging.leaving == StagingFree::kCopied) staging.leaving = StagingFree::kNow;
  }
}

void GradientMemory::written(std::uint32_t staging) {
  if (staging_[staging].leaving == StagingFree::kWritten) staging_[staging].leaving = StagingFree::kNow;
}

}  // namespace spillway
