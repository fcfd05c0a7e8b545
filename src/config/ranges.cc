#include "src/config/ranges.h"

#include <fmt/format.h>

#include <cmath>

#include "spillway/error.h"
#include "src/config/check.h"
#include "src/config/table.h"

namespace spillway {
namespace {

[[noreturn]] void refuse_range(std::string_view key, std::string what, std::string hint) {
  throw Error(Code::kInvalidArgument, {std::string(key), std::move(what), 0, std::move(hint)});
}

void check_number(std::string_view key, std::optional<double> number) {
  if (number && !(std::isfinite(*number) && *number >= 0)) {
    refuse_range(key, fmt::format("{} is out of range", *number), "give a finite number, at least 0");
  }
}

}  // namespace

const Config& check_ranges(const Config& config) {
  for (const ConfigKey& key : config_keys()) {
    const bool has_range = key.kind == KeyKind::kInteger || key.kind == KeyKind::kNumber ||
                           key.kind == KeyKind::kBytes || key.kind == KeyKind::kPair || key.kind == KeyKind::kNumbers;
    if (!has_range || key.place.show == nullptr || !is_listed(key, config)) continue;
    const std::string text = key.place.show(config);
    if (text.empty()) continue;
    JsonValue value;
    if (parse_json(text, {}, value)) refuse_range(key.path, text + " is no number", "give a finite one");
    KeyValue read;
    if (const auto problem = read_value(key, value, read)) refuse_range(key.path, problem->what, problem->hint);
  }
  check_number("Config::schedule.given_lr", config.schedule.given_lr);
  for (const ParameterGroup& group : config.parameter_groups) {
    check_number("spillway.parameter_groups.lr", group.learning_rate);
    check_number("spillway.parameter_groups.weight_decay", group.weight_decay);
  }
  if (const auto problem = problem_of_paths(config.nvme_paths)) {
    refuse_range("spillway.nvme_paths", problem->what, problem->hint);
  }
  if (const auto problem = problem_of_rates(config); problem && !config.nvme_rates.empty()) {
    refuse_range("spillway.nvme_rates", problem->what, problem->hint);
  }
  return config;
}

}  // namespace spillway
