// How often the optimizer has updated each parameter, and with which scalars it does so next: those of its group, with
// the bias correction of the parameter's own count. A parameter that gets no gradient in a step is left out of its
// update, as PyTorch leaves it out: neither its values nor its count change.
//
//   begin_update(step, scale) ─► take(block, …) … ─► scalars(), ranges(tile) ─► advance(), once the step is made
//
// Pure: the arithmetic is the kernels'. Nothing is allocated after construction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/tile_update.h"
#include "spillway/config.h"
#include "spillway/model.h"
#include "src/plan/plan.h"

namespace spillway {

class ParameterUpdates {
 public:
  // Of a new run: there were none. All three must outlive it.
  ParameterUpdates(const Config& config, const Plan& plan, const ModelDescription& model);

  // A run goes on in which the optimizer has made so many updates. `counts`: those of each parameter, block after block
  // as the model describes them; none: all of them the same. Throws kCorrupt, naming `object`, for what cannot be.
  void resume(std::uint64_t updates, std::span<const std::uint64_t> counts, const std::string& object);
  // The same for a commit or a snapshot: none while every trainable parameter has had all `updates`.
  std::span<const std::uint64_t> counts(std::uint64_t updates) const;

  // What comes is the optimizer's step `step`.
  void begin_update(std::uint64_t step, double gradient_scale);
  // The same by these values, one for each of the plan's groups, in place of the configuration's and its schedule.
  void begin_update(std::uint64_t step, double gradient_scale, std::span<const OptimizerConfig> groups);
  // The block's part of it. `brought`: by parameter, whether it got a gradient.
  void take(std::uint32_t block, std::span<const std::uint8_t> brought);
  // All blocks were taken, and the step is made.
  void advance();

  std::span<const OptimizerScalars> scalars() const { return scalars_; }
  // Of a parameter whose block was taken; null: it is not updated.
  const OptimizerScalars* scalars(std::uint32_t block, std::uint32_t parameter) const {
    const std::uint32_t choice = choice_[first_[block] + parameter];
    return choice == kNotUpdated ? nullptr : &scalars_[choice];
  }
  // Of a trainable tile, whose block was taken. Where they differ from the plan's they lie in `room`: at most one for
  // each of the block's parameters.
  std::span<const GroupRange> ranges(std::uint32_t tile, std::vector<GroupRange>& room) const;

 private:
  const Config& config_;
  const Plan& plan_;
  const ModelDescription& model_;
  std::vector<std::size_t> first_;         // by block: index of its first parameter in those by parameter
  std::vector<std::uint64_t> counts_;      // by parameter
  std::vector<std::uint32_t> choice_;      // by parameter: index into scalars_, or kNotUpdated
  std::vector<std::uint8_t> uneven_;       // by block: some parameter's choice is not its group
  std::vector<OptimizerScalars> scalars_;  // by group, of parameters that were in every step; then by parameter
  std::uint64_t step_ = 0;
  double gradient_scale_ = 1;
  std::span<const OptimizerConfig> given_;  // of this update; empty: the configuration's

  OptimizerScalars scalars_for(std::uint32_t group, std::uint64_t update) const;
};

}  // namespace spillway
