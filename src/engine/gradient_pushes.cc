#include "src/engine/gradient_pushes.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/device.h"
#include "spillway/error.h"

namespace spillway {

void refuse_gradient(const std::string& object, const std::string& happened, const std::string& hint) {
  throw Error(Code::kInvalidArgument, {object, happened, 0, hint});
}

GradientPushes::GradientPushes(const Plan& plan, const ModelDescription& model, std::span<const std::byte> hbm)
    : plan_(plan),
      model_(model),
      type_(plan.tile_places[0].shape.type),
      parts_(plan.sum_parts),
      told_(parts_ > 1 || (plan.peers.count > 1 && plan.sums == Sums::kTree)),
      hbm_(hbm),
      blocks_(plan.blocks.size()) {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const std::size_t parameters = model.blocks[b].parameters.size();
    blocks_[b].pushes.resize(parameters);
    blocks_[b].brought.resize(parameters);
    blocks_[b].sums.assign(parameters, PartSums(parts_, plan.blocks[b].sums_in_order));
  }
}

void GradientPushes::set_micro_batches(std::uint32_t micro_batches) {
  micro_batches_ = micro_batches;
  first_ = plan_.peers.index * micro_batches;
}

void GradientPushes::begin_step() {
  set_micro_batches(plan_.micro_batches);
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    Block& block = blocks_[b];
    std::ranges::fill(block.pushes, 0u);
    std::ranges::fill(block.brought, std::uint8_t{0});
    for (PartSums& sums : block.sums) sums.begin_step();
    block.open = 0;
    for (const Parameter& parameter : model_.blocks[b].parameters)
      block.open += parameter.trainable && parameter.pushes > 0;
  }
  accumulator_owner_.reset();
}

void GradientPushes::check(const Gradient& gradient) const {
  if (gradient.block >= blocks_.size() || gradient.parameter >= blocks_[gradient.block].pushes.size()) {
    refuse_gradient("push_gradient", "names a block or parameter that does not exist",
                    "use the indices of the description");
  }
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  const std::uint64_t count = plan_.blocks[gradient.block].partition.parameters[gradient.parameter].count;
  if (gradient.elements != 0 && gradient.elements != count) {
    refuse_gradient(parameter.name,
                    fmt::format("its gradient has {} elements, and it has {}", gradient.elements, count),
                    "push the gradient of the parameter that it is of");
  }
  if (gradient.data == nullptr) return;
  if (reinterpret_cast<std::uintptr_t>(gradient.data) % size_of(gradient.dtype) != 0) {
    refuse_gradient(parameter.name, "its gradient's address is no multiple of its type's size", "align it");
  }
  const std::uint64_t bytes = count * size_of(gradient.dtype);
  if (lies_in({static_cast<const std::byte*>(gradient.data), bytes}, hbm_)) return;
  refuse_gradient(parameter.name, "its gradient does not lie in the HBM arena", "push from Engine::workspace()");
}

void GradientPushes::refuse_unless_due(const Gradient& gradient) const {
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  if (!parameter.trainable) {
    refuse_gradient(parameter.name, "is frozen and takes no gradient", "describe it as trainable");
  }
  if (gradient.dtype != DType::kFloat32 && gradient.dtype != type_) {
    refuse_gradient(parameter.name, "a gradient is fp32 or of the weights' type", "convert it first");
  }
  if (blocks_[gradient.block].pushes[gradient.parameter] == parameter.pushes) {
    refuse_gradient(parameter.name,
                    parameter.pushes == kAnyPushes ? "got a gradient after the push that said that no more come"
                                                   : "got more gradients than described in one step",
                    parameter.pushes == kAnyPushes ? "push it before" : "set Parameter::pushes");
  }
  // Only where sums depend on it: elsewhere `micro_batch` means nothing and is not looked at.
  if (told_ && gradient.data != nullptr &&
      (gradient.micro_batch < first_ || gradient.micro_batch >= first_ + micro_batches_)) {
    const bool alone = plan_.peers.count == 1;
    refuse_gradient(parameter.name,
                    fmt::format("a gradient is of micro-batch {}, and {}", gradient.micro_batch,
                                alone ? fmt::format("a step has {}", micro_batches_)
                                      : fmt::format("rank {} has {} to {}", plan_.peers.index, first_,
                                                    first_ + micro_batches_ - 1)),
                    alone ? "count the micro-batches of a step from 0"
                          : "count the micro-batches of a step from 0, over all ranks");
  }
  if (gradient.data != nullptr && !blocks_[gradient.block].sums[gradient.parameter].takes(part_of(gradient))) {
    refuse_gradient(parameter.name,
                    fmt::format("a gradient is of micro-batch {}, which came to an end before", gradient.micro_batch),
                    "push one micro-batch after the other");
  }
  // One accumulator serves all blocks whose micro-batches come one after the other, so two of them cannot be open at
  // once.
  if (gradient.data != nullptr && plan_.blocks[gradient.block].accumulator_shared &&
      accumulator_owner_.value_or(gradient.block) != gradient.block) {
    refuse_gradient(parameter.name, "its gradient came while another block's was being accumulated",
                    "push all micro-batches of a block before the next, or describe more than one backward visit");
  }
}

bool GradientPushes::ends(const Gradient& gradient) const {
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  if (parameter.pushes == kAnyPushes) return gradient.data == nullptr;
  return blocks_[gradient.block].pushes[gradient.parameter] + 1 == parameter.pushes;
}

bool GradientPushes::would_complete(const Gradient& gradient) const {
  return blocks_[gradient.block].open == 1 && ends(gradient);
}

bool GradientPushes::take(const Gradient& gradient) {
  Block& block = blocks_[gradient.block];
  const bool last = ends(gradient);
  const std::uint32_t all = model_.blocks[gradient.block].parameters[gradient.parameter].pushes;
  std::uint32_t& pushes = block.pushes[gradient.parameter];
  // kAnyPushes ends by a push without data, whatever the number of pushes before it.
  pushes = last ? all : pushes + 1;
  if (gradient.data != nullptr) {
    block.brought[gradient.parameter] = 1;
    if (plan_.blocks[gradient.block].accumulator_shared) accumulator_owner_ = gradient.block;
  }
  const bool complete = last && --block.open == 0;
  // The shared accumulator is free for the next block.
  if (complete && accumulator_owner_ == gradient.block) accumulator_owner_.reset();
  return complete;
}

bool GradientPushes::begun() const {
  return std::ranges::any_of(blocks_, [](const Block& block) {
    return std::ranges::any_of(block.pushes, [](std::uint32_t pushes) { return pushes > 0; });
  });
}

bool GradientPushes::leaves_out(const Gradient& gradient) const {
  const Block& block = blocks_[gradient.block];
  const Parameter& parameter = model_.blocks[gradient.block].parameters[gradient.parameter];
  return parameter.trainable && gradient.data == nullptr && !block.brought[gradient.parameter] && ends(gradient);
}

void GradientPushes::check_complete() const {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    for (std::size_t p = 0; p < blocks_[b].pushes.size(); ++p) {
      const Parameter& parameter = model_.blocks[b].parameters[p];
      if (!parameter.trainable || blocks_[b].pushes[p] == parameter.pushes) continue;
      if (parameter.pushes == kAnyPushes) {
        throw Error(Code::kInvalidArgument, {parameter.name + " of block " + model_.blocks[b].name,
                                             "nothing said that it gets no more gradients", 0,
                                             "push every such parameter once without data before step()"});
      }
      throw Error(Code::kInvalidArgument, {parameter.name + " of block " + model_.blocks[b].name,
                                           "got " + std::to_string(blocks_[b].pushes[p]) + " of " +
                                               std::to_string(parameter.pushes) + " gradients in this step",
                                           0,
                                           "push every trainable parameter's gradient before step(), null where "
                                           "there is none"});
    }
  }
}

std::string GradientPushes::parameter_at(std::uint32_t block, std::uint64_t element) const {
  const auto& places = plan_.blocks[block].partition.parameters;
  for (std::size_t p = 0; p < places.size(); ++p) {
    if (element < places[p].first || element >= places[p].first + places[p].count) continue;
    return model_.blocks[block].parameters[p].name + " of " + block_name(block);
  }
  return block_name(block);
}

}  // namespace spillway
