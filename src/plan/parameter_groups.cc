#include "src/plan/parameter_groups.h"
#include "src/formats/element_count.h"

#include <fnmatch.h>

#include <algorithm>

#include <fmt/format.h>

#include "spillway/error.h"

namespace spillway {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

// A pattern that names nothing is a typing error that would silently train something else.
void check_groups(const Config& config, const ModelDescription& model) {
  for (std::size_t g = 0; g < config.parameter_groups.size(); ++g) {
    const bool scaled = config.schedule.kind != ScheduleKind::kConstant && config.optimizer.learning_rate == 0;
    if (scaled && config.parameter_groups[g].learning_rate) {
      throw Error(Code::kInvalidArgument, {fmt::format("spillway.parameter_groups[{}]", g),
                                           "a schedule cannot scale its lr as it scales the optimizer's, which is 0", 0,
                                           "set optimizer.params.lr"});
    }
    for (const std::string& pattern : config.parameter_groups[g].parameters) {
      bool found = false;
      for (const Block& block : model.blocks) {
        found = found || std::ranges::any_of(block.parameters, [&](const Parameter& p) {
                  return p.trainable && matches(pattern, p.name);
                });
      }
      if (found) continue;
      const Parameter& last = model.blocks.back().parameters.back();
      throw Error(Code::kInvalidArgument, {fmt::format("spillway.parameter_groups[{}]", g),
                                           fmt::format("\"{}\" matches no trainable parameter", pattern), 0,
                                           fmt::format("names look like {}; * stands for anything", last.name)});
    }
  }
}

GroupValues values_of(const Config& config, const Parameter& parameter) {
  const OptimizerConfig& optimizer = config.optimizer;
  GroupValues values{optimizer.learning_rate, optimizer.weight_decay};
  if (config.no_decay && parameter.shape.size() < 2) values.weight_decay = 0;
  for (const ParameterGroup& group : config.parameter_groups) {
    const auto here = [&](const std::string& pattern) { return matches(pattern, parameter.name); };
    if (std::ranges::none_of(group.parameters, here)) continue;
    values.learning_rate = group.learning_rate.value_or(values.learning_rate);
    values.weight_decay = group.weight_decay.value_or(values.weight_decay);
    break;
  }
  return values;
}

}  // namespace

ParameterGroups group_parameters(const Config& config, const ModelDescription& model) {
  check_groups(config, model);
  ParameterGroups groups;
  for (const Block& block : model.blocks) {
    std::vector<std::uint32_t>& indices = groups.parameter.emplace_back();
    for (const Parameter& parameter : block.parameters) {
      const GroupValues values = values_of(config, parameter);
      const auto found = std::ranges::find(groups.values, values);
      indices.push_back(static_cast<std::uint32_t>(found - groups.values.begin()));
      if (found == groups.values.end()) groups.values.push_back(values);
    }
  }
  return groups;
}

void ranges_of(const BlockPartition& partition, std::span<const std::uint32_t> group_of, const TileRange& tile,
               std::vector<GroupRange>& out) {
  out.clear();
  for (std::size_t p = 0; p < partition.parameters.size(); ++p) {
    const std::uint64_t first = partition.parameters[p].first;
    const std::uint64_t end = first + align_up(partition.parameters[p].count, kPartitionUnit);
    if (end <= tile.first || first >= tile.first + tile.count) continue;
    const std::uint64_t until = std::min(end - tile.first, tile.count);
    if (out.empty() || out.back().group != group_of[p]) out.push_back({until, group_of[p]});
    out.back().end = until;
  }
}

OptimizerScalars scalars_of(const Config& config, const GroupValues& values, UpdateNumber number,
                            double gradient_scale) {
  const double own = config.optimizer.learning_rate, now = learning_rate(config, number.step);
  OptimizerConfig optimizer = config.optimizer;
  const bool moves = config.schedule.kind != ScheduleKind::kConstant || config.schedule.given_lr;
  const double scaled = moves && own > 0 ? now * (values.learning_rate / own) : values.learning_rate;
  optimizer.learning_rate = values.learning_rate == own ? now : scaled;
  optimizer.weight_decay = values.weight_decay;
  return optimizer_scalars(optimizer, number.update, gradient_scale);
}

std::vector<std::string> describe_groups(const ParameterGroups& groups, const ModelDescription& model) {
  std::vector<std::string> lines;
  for (std::size_t g = 0; groups.values.size() > 1 && g < groups.values.size(); ++g) {
    std::uint64_t tensors = 0, elements = 0;
    for (std::size_t b = 0; b < model.blocks.size(); ++b) {
      for (std::size_t p = 0; p < model.blocks[b].parameters.size(); ++p) {
        const Parameter& parameter = model.blocks[b].parameters[p];
        if (groups.parameter[b][p] != g || !parameter.trainable) continue;
        ++tensors;
        elements += count_elements(parameter.name, parameter.shape);
      }
    }
    if (tensors == 0) continue;
    lines.push_back(fmt::format("parameter group: lr {:g}, weight decay {:g}: {} tensors, {} parameters",
                                groups.values[g].learning_rate, groups.values[g].weight_decay, tensors, elements));
  }
  return lines;
}

}  // namespace spillway
