// Which steps guess that clipping has no effect, and for how many blocks. With clipping, the update has to wait for the
// norm of all gradients; but while the norm stays below the limit, the update is the same as without clipping. So some
// blocks are updated inside backward on that guess, and taken back when it was wrong: what an update overwrites is not
// gone before a commit. This file only counts and chooses; early_update.h makes the update and takes it back.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "src/plan/plan.h"

namespace spillway {

// `count` of the plan's speculative blocks, or all of them, as the plan's visits complete their gradients. They are
// spread evenly, so that the drive is as busy in all of backward.
std::vector<std::uint32_t> speculated_blocks(const Plan& plan, std::uint32_t count);

class ClipGuess {
 public:
  // `blocks`: at most so many in a step; nothing: to be chosen.
  ClipGuess(const Plan& plan, std::optional<std::uint32_t> blocks);

  void begin_step() { taken_ = 0; }
  // What is updated inside backward in this step, as gradients complete; empty where the order is not known.
  // `committed`: what a guess is taken back to is durable.
  std::span<const std::uint32_t> expected(bool committed) const noexcept {
    return plan_.early_blocks || (committed && guesses()) ? expected_ : std::span<const std::uint32_t>();
  }
  // A block's gradient is complete: it is updated now.
  bool take(std::uint32_t block);
  std::uint32_t taken() const noexcept { return taken_; }                    // in this step
  std::uint32_t blocks() const noexcept { return guesses() ? blocks_ : 0; }  // that a step like this one takes
  // The step is done. `best` is asked after some steps, when there is something to choose.
  void end_step(bool clipped, const std::function<std::optional<std::uint32_t>()>& best);

 private:
  static constexpr std::uint32_t kCalmSteps = 2;

  bool guesses() const noexcept { return unclipped_ >= kCalmSteps; }
  void choose(std::uint32_t blocks);

  const Plan& plan_;
  bool chooses_ = false;
  std::vector<std::uint8_t> chosen_;  // by block
  std::vector<std::uint32_t> expected_;
  std::uint32_t blocks_ = 0, taken_ = 0;
  std::uint32_t unclipped_ = 0;  // the last steps, in a row
  std::uint32_t steps_ = 0;      // of this process
};

}  // namespace spillway
