#include "src/plan/state_sections.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "spillway/error.h"

namespace spillway {
namespace {

// A list for each optimizer, form and type of weights.
struct ReducedList {
  OptimizerKind optimizer;
  MomentFormat format;
  DType type;
  std::array<StateArray, 3> arrays;
  std::size_t count = 0;
};

constexpr ReducedList reduced_list(OptimizerKind optimizer, MomentFormat format, DType type) {
  ReducedList list{optimizer, format, type, {}};
  const auto add = [&list](StateArray array) { list.arrays.at(list.count++) = array; };
  if (has_exp_avg(optimizer)) add(moment_array(kExpAvg, format));
  if (has_exp_avg_sq(optimizer)) add(moment_array(kExpAvgSq, format));
  if (type == DType::kBFloat16) add({.name = kResidual, .type = "int16", .bytes = 2});
  if (type == DType::kFloat16) add({.name = kMaster, .type = "fp32", .bytes = 4});
  return list;
}

constexpr std::size_t kReducible = std::ranges::count_if(kOptimizerKinds, can_reduce);
constexpr auto kLists = [] {
  std::array<ReducedList, kReducible * kReducedFormats.size() * kDTypes.size()> lists{};
  std::size_t at = 0;
  for (const OptimizerKind optimizer : kOptimizerKinds) {
    if (!can_reduce(optimizer)) continue;
    for (const MomentFormat format : kReducedFormats) {
      for (const DType type : kDTypes) lists.at(at++) = reduced_list(optimizer, format, type);
    }
  }
  return lists;
}();

bool names(const std::string& pattern, const std::string& name) {
  return pattern == name || fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

// Vectors are few bytes and often matter much: norms and biases are never reduced.
bool stays_exact(const Config& config, const Parameter& parameter) {
  return parameter.shape.size() < 2 || std::ranges::any_of(config.exact_states, [&](const std::string& pattern) {
           return names(pattern, parameter.name);
         });
}

}  // namespace

StateList reduced_states(const Config& config) {
  for (const ReducedList& list : kLists) {
    if (list.optimizer == config.optimizer.kind && list.format == config.moments && list.type == config.weights)
      return std::span(list.arrays).first(list.count);
  }
  return {};
}

StateList states_of(const Config& config, const Parameter& parameter) {
  if (config.moments == MomentFormat::kFloat32 || stays_exact(config, parameter)) return {};
  return reduced_states(config);
}

MomentFormat format_of(const Config& config, const Parameter& parameter) {
  return states_of(config, parameter).empty() ? MomentFormat::kFloat32 : config.moments;
}

void check_reduced_states(const Config& config, const ModelDescription& model) {
  if (config.moments == MomentFormat::kFloat32) return;
  if (!can_reduce(config.optimizer.kind)) {
    throw Error(Code::kInvalidArgument, {"spillway.states",
                                         fmt::format("is {}, and {} has exact states alone", name_of(config.moments),
                                                     name_of(config.optimizer.kind)),
                                         0, "set it to fp32, or train with AdamW, Adam or Lion"});
  }
  if (config.exact_states == Config{}.exact_states) return;
  const Parameter* last = nullptr;
  for (const std::string& pattern : config.exact_states) {
    bool found = false;
    for (const Block& block : model.blocks) {
      for (const Parameter& parameter : block.parameters) {
        if (!parameter.trainable) continue;
        last = &parameter;
        found = found || names(pattern, parameter.name);
      }
    }
    if (found || last == nullptr) continue;
    throw Error(Code::kInvalidArgument,
                {"spillway.exact_states", fmt::format("\"{}\" matches no trainable parameter", pattern), 0,
                 fmt::format("names look like {}; * stands for anything", last->name)});
  }
}

}  // namespace spillway
