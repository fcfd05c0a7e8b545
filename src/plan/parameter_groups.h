// Which learning rate and weight decay every parameter takes. Pure.
#pragma once

#include <cstdint>
#include <span>
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

// The ranges of a trainable tile, in place of what `out` holds. Padding belongs to the parameter before it.
void ranges_of(const BlockPartition& partition, std::span<const std::uint32_t> group_of, const TileRange& tile,
               std::vector<GroupRange>& out);

// Which update of a parameter it is, and in which of the optimizer's steps: the first is 1 for both.
struct UpdateNumber {
  std::uint64_t step = 1;    // goes into the schedule
  std::uint64_t update = 1;  // goes into bias correction; less than `step` where the parameter was left out of some
};
// The scalars of a group's parameter. A schedule scales a group's rate as it scales the optimizer's.
OptimizerScalars scalars_of(const Config& config, const GroupValues& values, UpdateNumber number,
                            double gradient_scale);

// One line a group for the log; none while all parameters share one: `lr 1e-04, weight decay 0: 37 tensors, 1 234
// parameters`.
std::vector<std::string> describe_groups(const ParameterGroups& groups, const ModelDescription& model);

}  // namespace spillway
