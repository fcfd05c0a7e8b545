// Where gradients lie on their way down: the rules one by one, and what must hold in any order.
#include "swap/policy/gradient_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "tests/kernels/random.h"

namespace spillway {
namespace {

constexpr GradientMemoryOptions::Block kKept{.bytes = 10, .home = Placement::kHost};
constexpr GradientMemoryOptions::Block kSpilled{.bytes = 10, .home = Placement::kNvme};
constexpr GradientMemoryOptions::Block kPasses{.bytes = 10, .home = std::nullopt};

TEST(GradientMemory, StagingIsUsedInTurnAndFreeOnceItIsCopied) {
  GradientMemory memory({.blocks = {kKept, kKept, kKept}, .staging_bytes = {10, 10}, .passing_bytes = {}});
  memory.begin_step();
  for (const std::uint32_t block : {0u, 1u}) {
    EXPECT_EQ(memory.stage(block), (GradientStaging{.staging = block}));
    EXPECT_EQ(memory.stage(block), (GradientStaging{.staging = block})) << "it has that one";
    EXPECT_EQ(memory.complete(block), (GradientDown{.way = DownWay::kWhole, .block = block, .staging = block}));
  }
  EXPECT_EQ(memory.stage(2), (GradientStaging{.staging = 0, .free = StagingFree::kCopied}));
  memory.complete(2);
  memory.copied();
  memory.begin_step();
  EXPECT_EQ(memory.stage(0), (GradientStaging{.staging = 1})) << "in turn over steps as well";
}

// What was sent in one step may still be on its way in the next.
TEST(GradientMemory, AStepThatBeginsForgetsWhatItHoldsAndNotWhatLeaves) {
  GradientMemory memory({.blocks = {kKept, kSpilled}, .staging_bytes = {10, 10}, .passing_bytes = {}});
  memory.begin_step();
  memory.stage(0);
  memory.stage(1);
  memory.complete(1);
  memory.begin_step();
  EXPECT_EQ(memory.stage(1), (GradientStaging{.staging = 0})) << "what block 0 had there is of no use";
  EXPECT_EQ(memory.stage(0), (GradientStaging{.staging = 1, .free = StagingFree::kWritten}));
}

TEST(GradientMemory, ALargeGradientWaitsForStagingThatFits) {
  GradientMemory memory(
      {.blocks = {{.bytes = 30}, {.bytes = 10}, {.bytes = 30}}, .staging_bytes = {30, 10}, .passing_bytes = {}});
  memory.begin_step();
  EXPECT_EQ(memory.stage(0).staging, 0u);
  memory.complete(0);
  EXPECT_EQ(memory.stage(2), (GradientStaging{.staging = 0, .free = StagingFree::kCopied}))
      << "the turn is the other's";
  EXPECT_EQ(memory.stage(1).staging, 1u);
}

TEST(GradientMemory, WithMoreBlocksOpenThanStagingPartsGoDown) {
  GradientMemory memory({.blocks = {kKept, kKept}, .staging_bytes = {10}, .passing_bytes = {}});
  memory.begin_step();
  memory.stage(0);
  const GradientDown parts{.way = DownWay::kParts, .block = 0, .staging = 0};
  EXPECT_EQ(memory.stage(1), (GradientStaging{.staging = 0, .down = parts, .free = StagingFree::kCopied}));
  EXPECT_EQ(memory.complete(1).way, DownWay::kWhole);
  EXPECT_EQ(memory.stage(0).down, std::nullopt);
  EXPECT_EQ(memory.complete(0), parts) << "the rest of it, too";
  memory.begin_step();
  memory.stage(0);
  EXPECT_EQ(memory.complete(0).way, DownWay::kWhole) << "another step";
}

TEST(GradientMemory, WhatIsSpilledGoesDownWholeAndKeepsOthersWaiting) {
  GradientMemory memory({.blocks = {kSpilled, kKept}, .staging_bytes = {10}, .passing_bytes = {}});
  memory.begin_step();
  memory.stage(0);
  EXPECT_EQ(memory.in_the_way(0), std::nullopt);
  EXPECT_EQ(memory.in_the_way(1), 0u);
  EXPECT_EQ(memory.complete(0), (GradientDown{.way = DownWay::kSpill, .block = 0, .staging = 0}));
  EXPECT_EQ(memory.in_the_way(1), std::nullopt);
  EXPECT_EQ(memory.leaving(0), StagingFree::kWritten);
  memory.copied();
  EXPECT_EQ(memory.leaving(0), StagingFree::kWritten) << "a copy into a chunk is not the end of it";
  EXPECT_EQ(memory.stage(1), (GradientStaging{.staging = 0, .free = StagingFree::kWritten}));
  memory.complete(1);
  memory.written(0);
  EXPECT_EQ(memory.leaving(0), StagingFree::kCopied) << "that was of the spill before";
}

TEST(GradientMemory, WhatPassesTakesTheSmallestTurnAndGivesItBackWithTheUpdate) {
  GradientMemory memory({.blocks = {kPasses, kPasses, {.bytes = 20, .home = std::nullopt}},
                         .staging_bytes = {20},
                         .passing_bytes = {20, 10}});
  memory.begin_step();
  memory.come(0);
  EXPECT_EQ(memory.passing(0), 1u) << "the first is for the largest";
  memory.come(0);
  EXPECT_EQ(memory.passing(0), 1u);
  memory.come(1);
  EXPECT_EQ(memory.passing(1), 0u);
  EXPECT_FALSE(memory.has_room(2));
  EXPECT_TRUE(memory.has_room(0)) << "it has some";
  memory.updated(0);
  EXPECT_FALSE(memory.has_room(2)) << "too small";
  memory.updated(1);
  EXPECT_TRUE(memory.has_room(2));
  memory.come(2);
  memory.stage(2);
  EXPECT_EQ(memory.complete(2).passing, 0u);
}

TEST(GradientMemory, WhatStaysInHbmHasNoStaging) {
  GradientMemory memory({.blocks = {{.bytes = 10, .home = Placement::kHbm}}, .staging_bytes = {}, .passing_bytes = {}});
  memory.begin_step();
  EXPECT_TRUE(memory.has_room(0));
  EXPECT_EQ(memory.in_the_way(0), std::nullopt);
  memory.come(0);
  EXPECT_EQ(memory.complete(0), (GradientDown{.way = DownWay::kStays, .block = 0}));
}

// Parts of random blocks come in a random order and leave when they like. A piece of memory holds one gradient at a
// time, nothing comes where another is still leaving unless the answer says so, and every part goes down once.
class RandomOrder {
 public:
  explicit RandomOrder(std::mt19937_64& random) : random_(random) {
    const Home homes[] = {Placement::kHost, Placement::kNvme, std::nullopt};
    std::uint64_t most = 0;
    for (std::uint64_t b = 1 + below(8); b > 0; --b) {
      options_.blocks.push_back({.bytes = 1 + below(20), .home = homes[below(3)]});
      most = std::max(most, options_.blocks.back().bytes);
    }
    options_.staging_bytes = {most};
    options_.passing_bytes = {most};
    for (std::uint64_t s = below(3); s > 0; --s) options_.staging_bytes.push_back(1 + below(most));
    for (std::uint64_t p = below(3); p > 0; --p) options_.passing_bytes.push_back(1 + below(most));
    memory_.emplace(options_);
    leaving_.resize(options_.staging_bytes.size(), StagingFree::kNow);
  }

  void step() {
    const auto blocks = static_cast<std::uint32_t>(options_.blocks.size());
    memory_->begin_step();
    staged_.assign(leaving_.size(), std::nullopt);
    in_passing_.assign(options_.passing_bytes.size(), std::nullopt);
    to_come_.clear();
    in_staging_.assign(blocks, 0);
    down_.assign(blocks, 0);
    split_.assign(blocks, false);
    for (std::uint32_t b = 0; b < blocks; ++b) to_come_.push_back(1 + below(4));
    const std::vector<std::uint64_t> parts = to_come_;
    std::vector<std::uint32_t> complete;
    while (std::ranges::any_of(to_come_, [](std::uint64_t left) { return left > 0; })) {
      something_leaves();
      const std::uint32_t b = next_block();
      while (!memory_->has_room(b)) {
        ASSERT_FALSE(complete.empty() && open_passing() == 0);
        if (complete.empty()) return;  // the caller is refused
        update(complete.front());
        complete.erase(complete.begin());
      }
      part(b);
      if (::testing::Test::HasFatalFailure()) return;
      if (--to_come_[b] > 0) continue;
      const GradientDown down = memory_->complete(b);
      went_down(down);
      EXPECT_EQ(memory_->leaving(down.staging), leaving_[down.staging]);
      if (!options_.blocks[b].home) complete.push_back(b);
    }
    EXPECT_EQ(down_, parts);
  }

 private:
  std::uint64_t below(std::uint64_t end) { return random_() % end; }

  // Any that is not complete; the one in the way, where there is one.
  std::uint32_t next_block() {
    std::uint32_t b = 0;
    do b = static_cast<std::uint32_t>(below(to_come_.size()));
    while (to_come_[b] == 0);
    if (const auto other = memory_->in_the_way(b)) {
      EXPECT_EQ(options_.blocks[*other].home, Placement::kNvme);
      EXPECT_GT(in_staging_[*other], 0u);
      b = *other;
    }
    return b;
  }

  std::size_t open_passing() const {
    return static_cast<std::size_t>(std::ranges::count_if(in_passing_, [](const auto& b) { return b.has_value(); }));
  }

  void something_leaves() {
    if (below(4) == 0) {
      memory_->copied();
      std::ranges::replace(leaving_, StagingFree::kCopied, StagingFree::kNow);
    }
    const std::uint64_t s = below(leaving_.size());
    if (below(4) == 0 && leaving_[s] == StagingFree::kWritten) {
      memory_->written(static_cast<std::uint32_t>(s));
      leaving_[s] = StagingFree::kNow;
    }
  }

  void part(std::uint32_t b) {
    memory_->come(b);
    const auto passing = memory_->passing(b);
    ASSERT_EQ(passing.has_value(), !options_.blocks[b].home);
    if (passing) {
      ASSERT_EQ(in_passing_[*passing].value_or(b), b) << "another's gradient lies there";
      ASSERT_GE(options_.passing_bytes[*passing], options_.blocks[b].bytes);
      in_passing_[*passing] = b;
    }
    const GradientStaging answer = memory_->stage(b);
    if (answer.down) {
      split_[answer.down->block] = true;
      went_down(*answer.down);
    }
    ASSERT_EQ(staged_[answer.staging].value_or(b), b);
    if (!staged_[answer.staging]) {
      ASSERT_EQ(answer.free, leaving_[answer.staging]);
    }
    ASSERT_GE(options_.staging_bytes[answer.staging], options_.blocks[b].bytes);
    leaving_[answer.staging] = StagingFree::kNow;
    staged_[answer.staging] = b;
    ++in_staging_[b];
  }

  void went_down(const GradientDown& down) {
    const bool spilled = options_.blocks[down.block].home == Placement::kNvme;
    EXPECT_EQ(staged_[down.staging], down.block);
    EXPECT_EQ(down.way, spilled ? DownWay::kSpill : split_[down.block] ? DownWay::kParts : DownWay::kWhole);
    EXPECT_TRUE(!spilled || !split_[down.block]);
    EXPECT_EQ(down.passing, memory_->passing(down.block));
    down_[down.block] += in_staging_[down.block];
    in_staging_[down.block] = 0;
    staged_[down.staging].reset();
    leaving_[down.staging] = spilled ? StagingFree::kWritten : StagingFree::kCopied;
  }

  void update(std::uint32_t b) {
    in_passing_[*memory_->passing(b)].reset();
    memory_->updated(b);
  }

  std::mt19937_64& random_;
  GradientMemoryOptions options_;
  std::optional<GradientMemory> memory_;
  std::vector<StagingFree> leaving_;                               // by staging
  std::vector<std::optional<std::uint32_t>> staged_, in_passing_;  // the block that lies there
  std::vector<std::uint64_t> to_come_, in_staging_, down_;         // parts, by block
  std::vector<bool> split_;
};

TEST(GradientMemory, HoldsOneGradientInAPlaceInAnyOrder) {
  std::mt19937_64 random = seeded_generator();
  for (int round = 0; round < 500 && !HasFailure(); ++round) {
    RandomOrder order(random);
    for (int step = 0; step < 4; ++step) order.step();
  }
}

}  // namespace
}  // namespace spillway
