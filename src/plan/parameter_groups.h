// Which learning rate and weight decay every parameter takes. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/tile_update.h"
#include "spillway/config.h"
#include "spillway/model.h"
#include "src/plan/partition.h"

namespace spillway {

struct GroupValues {
  double learning_rate = 0, weight_decay = 0;
  bool operator==(const GroupValues&) const = default;
};

struct ParameterGroups {
  std::vector<GroupValues> values;                    // distinct; at least one
  std::vector<std::vector<std::uint32_t>> parameter;  // [block][parameter]: index into values
};

// The first group of the configuration with a pattern that matches a parameter's name decides; where none does, the
// optimizer's own values hold, and with no_decay a parameter of fewer than two dimensions has no decay unless its group
// says so. Throws kInvalidArgument for a pattern that matches no trainable parameter.
ParameterGroups group_parameters(const Config& config, const ModelDescription& model);

// The ranges of a trainable tile. Padding belongs to the parameter before it.
std::vector<GroupRange> ranges_of(const BlockPartition& partition, const std::vector<std::uint32_t>& group_of,
                                  const TileRange& tile);

// The scalars of every group at optimizer step `step`. A schedule scales a group's rate as it scales the optimizer's.
void scalars_of(const Config& config, const ParameterGroups& groups, std::uint64_t step, double gradient_scale,
                std::vector<OptimizerScalars>& out);

// One line a group for the log; none while all parameters share one: `lr 1e-04, weight decay 0: 37 tensors, 1 234
// parameters`.
std::vector<std::string> describe_groups(const ParameterGroups& groups, const ModelDescription& model);

}  // namespace spillway
