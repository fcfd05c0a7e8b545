// What has come of a step's gradients, and what of it is refused. Pure: it only counts, and touches no gradient.
//
//   check(gradient) ─► refuse_unless_due(gradient) ─► take(gradient)       a refused push counts for nothing
//
// Errors: kInvalidArgument. Read next: gradients.h, which does the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spillway/engine.h"
#include "src/plan/plan.h"
#include "swap/policy/part_sums.h"

namespace spillway {

[[noreturn]] void refuse_gradient(const std::string& object, const std::string& happened, const std::string& hint);

class GradientPushes {
 public:
  // `hbm`: the arena in which gradients lie when they are pushed. Plan and model must outlive it.
  GradientPushes(const Plan& plan, const ModelDescription& model, std::span<const std::byte> hbm);

  void begin_step();
  // Of this rank, in the step that has begun: fewer than the plan's.
  void set_micro_batches(std::uint32_t micro_batches);
  // Throws for a parameter that does not exist, another number of elements, and for memory outside of HBM.
  void check(const Gradient& gradient) const;
  // For one that is not described, comes too often, or while another block's is added up in the shared accumulator.
  void refuse_unless_due(const Gradient& gradient) const;

  // True: with it the block is complete.
  bool take(const Gradient& gradient);
  bool would_complete(const Gradient& gradient) const;

  // The block's pushes are added up in an accumulator, before anything of them is rounded.
  bool accumulates(std::uint32_t block) const {
    return plan_.blocks[block].accumulator || plan_.blocks[block].accumulator_home;
  }
  bool open(std::uint32_t block) const { return blocks_[block].open > 0; }  // more is to come
  bool begun() const;                                                       // some gradient of the step has been pushed
  // With it the parameter has had all pushes of the step, and none of them a gradient.
  bool leaves_out(const Gradient& gradient) const;
  // Throws naming the first parameter whose gradient is missing.
  void check_complete() const;
  // How the parameter's pushes are summed; the part that a gradient belongs to.
  PartSums& sums(std::uint32_t block, std::uint32_t parameter) { return blocks_[block].sums[parameter]; }
  std::uint32_t part_of(const Gradient& gradient) const {
    if (parts_ == 1) return 0;
    return static_cast<std::uint32_t>(std::uint64_t{gradient.micro_batch - first_} * parts_ / micro_batches_);
  }
  // By parameter: whether a push brought a gradient.
  std::span<const std::uint8_t> brought(std::uint32_t block) const { return blocks_[block].brought; }
  // It did on another rank.
  void note_brought(std::uint32_t block, std::uint32_t parameter) { blocks_[block].brought[parameter] = 1; }
  bool trainable(std::uint32_t block, std::uint32_t parameter) const {
    return model_.blocks[block].parameters[parameter].trainable;
  }

  std::string block_name(std::uint32_t block) const { return "block " + model_.blocks[block].name; }
  // Of the parameter that has this element of the block's vector.
  std::string parameter_at(std::uint32_t block, std::uint64_t element) const;

 private:
  // With it the parameter has had all pushes of the step.
  bool ends(const Gradient& gradient) const;

  struct Block {
    std::vector<std::uint32_t> pushes;  // per parameter
    std::vector<std::uint8_t> brought;  // per parameter: one of them had a gradient
    std::vector<PartSums> sums;         // per parameter
    std::uint32_t open = 0;             // parameters that expect more pushes
  };

  const Plan& plan_;
  const ModelDescription& model_;
  const DType type_;
  std::uint32_t first_ = 0, micro_batches_ = 1;  // of the step: this rank's, and the first of them
  const std::uint32_t parts_;
  const bool told_;  // a gradient says which micro-batch it is of
  const std::span<const std::byte> hbm_;
  std::vector<Block> blocks_;
  std::optional<std::uint32_t> accumulator_owner_;  // block that uses the shared accumulator
};

}  // namespace spillway
